"""Data sets by name: downloads from a server on loopback, checksums, mirrors, folders; ``dglkge data``."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dglkge.data import public_data
from dglkge.data.public_data import PublicData, find_public, get_public, local_folder
from dglkge.errors import InputError
from dglkge.partition.make_dataset import dataset_of_run, partition_triples
from dglkge.partition.options import Options
from tests.partition_tools.conftest import (
    build_here,  # noqa: F401
    named_triples,
)

pytestmark = pytest.mark.usefixtures("build_here")

SPLITS = {"train": "a\tr\tb\nb\tr\tc\n", "valid": "a\ts\tc\n", "test": "c\tr\ta\n"}
NOWHERE = "http://127.0.0.1:9/"
COUNTS = {"entities": 3, "relations": 2, "train": 2, "valid": 1, "test": 1}


class Quiet(SimpleHTTPRequestHandler):
    requests: list[str] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A folder that a server on loopback offers, and its URL; the cache is a folder of the test."""
    monkeypatch.setenv("DGLKGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DGLKGE_DATA", raising=False)
    folder = tmp_path / "served"
    folder.mkdir()
    monkeypatch.setattr(Quiet, "requests", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def packed(name: str, inside: str = "") -> bytes:
    """An archive of the splits, in a folder of it or not."""
    kind = "zip" if name.endswith(".zip") else "gztar"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source" / inside
        source.mkdir(parents=True)
        for split, text in SPLITS.items():
            (source / f"{split}.txt").write_text(text)
        return Path(shutil.make_archive(f"{folder}/made", kind, f"{folder}/source")).read_bytes()


def entry_of(url: str, files: dict[str, str | None]) -> PublicData:
    return PublicData("Toy-1", url, files, COUNTS, "none", "nobody")


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def texts(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in folder.glob("*.txt")}


@pytest.mark.parametrize("name, inside", [("toy.tar.gz", ""), ("toy.zip", "toy/")])
def test_an_archive_is_downloaded_once_and_unpacked(served, name, inside, tmp_path):
    folder, url = served
    content = packed(name, inside)
    (folder / name).write_bytes(content)
    entry = entry_of(url, {name: sha256(content)})
    for _ in range(2):
        assert texts(local_folder(entry)) == SPLITS
    assert Quiet.requests == [f"/{name}"]
    assert [path.name for path in (tmp_path / "cache" / "datasets").iterdir()] == ["Toy-1"]


def test_another_checksum_is_refused_and_git_may_have_it(served, tmp_path):
    folder, url = served
    (folder / "toy.zip").write_bytes(packed("toy.zip")[:-1])
    for algorithm in ("sha256", "git"):
        words = f"toy.zip of {url} has the {algorithm} checksum [0-9a-f]+, expected 00: the down"
        with pytest.raises(InputError, match=words):
            local_folder(entry_of(url, {"toy.zip": f"{algorithm}:00"}))
    assert not (tmp_path / "cache").exists()
    files: dict[str, str | None] = {}
    for split, text in SPLITS.items():
        (folder / f"{split}.txt").write_text(text)
        # As git hash-object computes it.
        files[f"{split}.txt"] = "git:" + hashlib.sha1(f"blob {len(text)}\0{text}".encode()).hexdigest()
    assert texts(local_folder(entry_of(url, files))) == SPLITS


def test_damaged_and_malicious_archives(served, tmp_path):
    folder, url = served
    entry = entry_of(url, {"toy.tar.gz": None})
    (folder / "toy.tar.gz").write_bytes(packed("toy.tar.gz")[:40])
    with pytest.raises(InputError, match="toy.tar.gz cannot be unpacked: "):
        local_folder(entry)
    with tarfile.open(folder / "toy.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("../../../../evil.txt")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(InputError, match="toy.tar.gz cannot be unpacked: .*evil.txt.* outside the dest"):
        local_folder(entry)
    assert not list(tmp_path.rglob("evil.txt")) and not (tmp_path.parent / "evil.txt").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("url, reason", [(None, "HTTP status 404"), (NOWHERE, "onnection refused")])
def test_without_the_file_or_the_network_the_message_says_what_to_do(served, url, reason, tmp_path):
    url = url or served[1]
    with pytest.raises(InputError) as caught:
        local_folder(entry_of(url, {"toy.zip": None}))
    message = str(caught.value)
    assert message.startswith(f"cannot download Toy-1 from {url}toy.zip (") and reason in message
    assert "put toy.zip into FOLDER/Toy-1 and set DGLKGE_DATA=FOLDER" in message
    assert "<" not in message and "\n" not in message and not (tmp_path / "cache").exists()


def test_a_failed_build_leaves_no_folders(served, tmp_path, monkeypatch):
    """Neither of the data set, nor of a run, nor parents of either; those that were there stay."""
    monkeypatch.setitem(public_data.public_data(), "Toy-1", entry_of(served[1], {"toy.zip": None}))
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for folder in (tmp_path / "new" / "data", tmp_path / "there"):
        with pytest.raises(InputError, match="cannot download Toy-1"):
            partition_triples("toy-1", folder / "toy")
        with pytest.raises(InputError, match="cannot download Toy-1"):
            dataset_of_run("toy-1", folder / "run", Options())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_or_a_mirror_takes_the_place_of_the_address(served, monkeypatch, tmp_path):
    """The files of the registry, checked and unpacked; or the splits in any format that is read."""
    folder, url = served
    content = packed("toy.zip")
    (folder / "Toy-1").mkdir()
    (folder / "Toy-1" / "toy.zip").write_bytes(content)
    monkeypatch.setenv("DGLKGE_DATA", url.rstrip("/"))
    assert texts(local_folder(entry_of(NOWHERE, {"toy.zip": None}))) == SPLITS
    assert Quiet.requests == ["/Toy-1/toy.zip"]
    shutil.rmtree(tmp_path / "cache")
    mine = tmp_path / "mine" / "toy_1"
    mine.mkdir(parents=True)
    (mine / "toy.zip").write_bytes(content)
    monkeypatch.setenv("DGLKGE_DATA", str(tmp_path / "mine"))
    with pytest.raises(InputError, match="toy.zip of .*mine/toy_1 has the sha256 checksum"):
        local_folder(entry_of(NOWHERE, {"toy.zip": "sha256:00"}))
    entry = entry_of(NOWHERE, {"toy.zip": sha256(content)})
    assert texts(local_folder(entry)) == SPLITS
    (mine / "toy.zip").unlink()
    assert local_folder(entry) == mine
    mine.rename(mine.with_name("other"))
    with pytest.raises(InputError, match="DGLKGE_DATA is .*mine, which has no folder Toy-1; expected its"):
        local_folder(entry)
    assert len(Quiet.requests) == 1


def test_names_in_any_spelling_and_counts():
    for name in ("fb15k-237", "FB15K237", "fb15k_237"):
        assert find_public(name) is public_data.public_data()["FB15k-237"]
    assert find_public("FB15k").name == "FB15k" and find_public("mine") is None
    with pytest.raises(InputError, match="unknown data set 'fb15k-273'; did you mean 'FB15k-237'"):
        get_public("fb15k-273")
    with pytest.raises(InputError, match="here has 0 test triples, Toy-1 has 1"):
        entry_of("", {}).check_counts(3, 2, {"train": 2, "valid": 1}, Path("here"))


TOY_COUNTS = {"entities": 3, "relations": 1, "train": 2, "valid": 0, "test": 1}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A registry of one data set, in a folder in place of the network."""
    entry = PublicData("Toy-3", NOWHERE, {"toy.zip": None}, TOY_COUNTS, "free", "Nobody 2020")
    monkeypatch.setattr(public_data, "public_data", lambda: {"Toy-3": entry})
    folder = tmp_path / "offline" / "toy-3"
    folder.mkdir(parents=True)
    (folder / "train.tsv").write_text("a\tr\tb\nb\tr\tc\n")
    (folder / "test.tsv").write_text("c\tr\ta\n")
    monkeypatch.setenv("DGLKGE_DATA", str(tmp_path / "offline"))
    monkeypatch.setenv("DGLKGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_name_in_place_of_files(tmp_path, call, offline):
    status, out, err = call("data", "build", "toy3")
    assert status == 0, err
    assert "Toy-3: Nobody 2020; licence: free\n" in out and "the dataset lies in data/toy3\n" in out
    assert named_triples(tmp_path / "data" / "toy3", "test") == [("c", "r", "a")]
    described = json.loads((tmp_path / "data" / "toy3" / "dataset.json").read_text())
    assert described["input"]["name"] == "Toy-3"
    (offline / "test.tsv").write_text("c\tr\ta\nc\tr\td\n")
    status, _, err = call("partition", "--input", "toy-3", "--output", "out")
    assert status == 2 and not (tmp_path / "out").exists()
    assert err == (
        f"dglkge: error: {offline} has 4 entities, Toy-3 has 3: another version of the data, "
        "or a damaged file; remove the folder and get it again\n"
    )


def test_get_and_list_and_neither_a_file_nor_a_name(call, offline):
    status, out, _ = call("data", "get", "TOY_3")
    counts = "Toy-3: 3 entities, 1 relations, 2 train, 0 valid, 1 test"
    assert (status, out.splitlines()) == (0, [counts, "Nobody 2020", "licence: free", str(offline)])
    listed = json.loads(call("data", "list", "--json")[1])
    assert listed["Toy-3"]["counts"] == TOY_COUNTS and listed["Toy-3"]["verified_by"] == "counts"
    row = call("data", "list")[1].splitlines()[1]
    assert row.split() == ["Toy-3", "3", "1", "2", "0", "1", "counts"]
    for words, message in (
        ("data get toy", "unknown data set 'toy'; did you mean 'Toy-3'"),
        ("partition toy --output out", "toy: there is no such file or folder; unknown data set 'toy'"),
        ("partition toy.tsv --output out", "toy.tsv: there is no such file or folder\n"),
        ("partition --output out", "give a folder or files of triples, or a name of dglkge data list"),
    ):
        status, _, err = call(*words.split())
        assert status == 2 and err.startswith(f"dglkge: error: {message}")
