"""Files to a machine and back, over an agent on this one: each in one step, unchanged ones not again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dglkge.errors import InputError
from dglkge.launch.connection import NodeConnection, open_node
from dglkge.launch.remote import file_transfer, host_files
from dglkge.launch.remote.file_transfer import Tree, fetch, files_below, send
from tests.launch.conftest import ROOT, TIMEOUT_SECONDS

ODD_NAMES = ("a b", "it's", "$x; `id`", "-C", "deep/er/file", "new\nline", "é", "@file")


@pytest.fixture(scope="module")
def session() -> Iterator[NodeConnection]:
    """An agent on this machine."""
    opened = open_node("here", None, sys.executable, {"PYTHONPATH": str(ROOT)})
    yield opened
    opened.close()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with odd names in it."""
    folder = tmp_path / "he re"
    for name in ODD_NAMES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def every(name: str) -> bool:
    """Want each file."""
    return True


def contents(folder: Path) -> dict[str, str]:
    """All files below a folder."""
    return {name: (folder / name).read_text() for name in files_below(folder)}


def test_there_and_back(session: NodeConnection, here: Path, tmp_path: Path) -> None:
    """Every name and byte arrives; what has not changed is not sent again; nothing else is left."""
    there, back = tmp_path / "there", tmp_path / "back"
    tree = Tree(str(here), str(there), files_below(here))
    assert send(session, tree) == len(ODD_NAMES)
    assert contents(there) == {name: name for name in ODD_NAMES}
    assert send(session, tree) == 0
    (here / "a b").write_text("longer")
    assert send(session, tree) == 1
    assert (there / "a b").read_text() == "longer"

    def is_wanted(name: str) -> bool:
        return name != "it's"

    assert fetch(session, str(there), str(back), is_wanted) == len(ODD_NAMES) - 1
    assert contents(back) == {name: text for name, text in contents(here).items() if name != "it's"}
    assert fetch(session, str(there), str(back), is_wanted) == 0
    assert not [path for path in tmp_path.rglob("*") if host_files.STAGING_PREFIX in path.name]


def test_unfinished_files_stay_where_they_are(session: NodeConnection, tmp_path: Path) -> None:
    """Their writer renames them while the others are read."""
    there, back = tmp_path / "there", tmp_path / "back"
    (there / "deep.tmp").mkdir(parents=True)
    for name in ("trackers.json", "trackers.json.106.tmp", "deep.tmp/whole", "deep.tmp/part.h5.tmp"):
        (there / name).write_text(name)
    assert fetch(session, str(there), str(back), every) == 2
    assert sorted(contents(back)) == ["deep.tmp/whole", "trackers.json"]


def test_records_of_one_second_and_size_are_sent(session: NodeConnection, tmp_path: Path) -> None:
    """Two versions of metrics.json may differ in a digit only."""
    there, back, again = (tmp_path / name for name in ("there", "back", "again"))
    there.mkdir()
    for mrr in ("0.25", "0.31"):
        (there / "metrics.json").write_text(mrr)
        os.utime(there / "metrics.json", (1_000_000_000, 1_000_000_000))
        assert fetch(session, str(there), str(back), every) == 1
        assert send(session, Tree(str(there), str(again), ("metrics.json",))) == 1
        assert (back / "metrics.json").read_text() == (again / "metrics.json").read_text() == mrr
        assert fetch(session, str(there), str(back), every) == 0


def test_links_stay_links(session: NodeConnection, tmp_path: Path) -> None:
    """Kept versions of a checkpoint are links."""
    (tmp_path / "from" / "best").mkdir(parents=True)
    (tmp_path / "from" / "file").write_text("x")
    os.symlink("../file", tmp_path / "from" / "best" / "link")
    fetch(session, str(tmp_path / "from"), str(tmp_path / "to"), every)
    assert os.readlink(tmp_path / "to" / "best" / "link") == "../file"


def test_leavings_of_a_broken_transfer_go(tmp_path: Path) -> None:
    """What an ended process has written and never placed is removed by the next transfer."""
    script = "import sys; from dglkge.launch.remote.host_files import make_staging; make_staging(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env={"PYTHONPATH": str(ROOT)})
    (left,) = tmp_path.iterdir()
    first, second = host_files.make_staging(str(tmp_path)), host_files.make_staging(str(tmp_path))
    assert {str(path) for path in tmp_path.iterdir()} == {first, second} and not left.exists()


def test_machines_are_copied_from_side_by_side(session: NodeConnection, tmp_path: Path) -> None:
    """Each transfer removed the staging folders of the others: logs of several machines did not come back."""
    for machine in "ab":
        (tmp_path / machine).mkdir()
        (tmp_path / machine / f"{machine}.log").write_text(machine)
    first, second, back = (str(tmp_path / name) for name in ("a", "b", "back"))
    # The second begins when all files of the first are in its staging folder.
    fetch(session, first, back, every, lambda: fetch(session, second, back, every))
    assert contents(tmp_path / "back") == {f"{machine}.log": machine for machine in "ab"}


def test_what_cannot_be_sent(session: NodeConnection, here: Path, tmp_path: Path) -> None:
    """A missing file, and a folder that cannot be made, are told by name."""
    with pytest.raises(InputError, match="cannot send .*absent: there is no such file"):
        send(session, Tree(str(here), str(tmp_path), ("absent",)))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write to .*file/there: Not a directory"):
        send(session, Tree(str(here), str(tmp_path / "file" / "there"), ("a b",)))


@pytest.mark.parametrize("stuck", ["reading", "writing"])
def test_a_blocked_disk_does_not_hold_the_launcher(
    session: NodeConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    """A block that does not move is given up, whether it is read here or written."""
    wait = threading.Event().wait
    monkeypatch.setattr(file_transfer, "STALL_SECONDS", 1.0)
    name = "read_block" if stuck == "reading" else "write_block"
    monkeypatch.setattr(file_transfer, name, lambda *_: wait(TIMEOUT_SECONDS))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "large").write_bytes(b"x" * 3_000_000)
    with pytest.raises(InputError, match=r"copied from or to here: nothing moved for 1 s; is a disk blocked"):
        if stuck == "reading":
            send(session, Tree(str(tmp_path / "here"), str(tmp_path / "there"), ("large",)))
        else:
            fetch(session, str(tmp_path / "here"), str(tmp_path / "there"), every)
    assert not list((tmp_path / "there").glob("large"))


def test_large_files_and_their_attributes(session: NodeConnection, tmp_path: Path) -> None:
    """In several blocks with others beside them; mode and time of the last change are kept."""
    there, back = tmp_path / "there", tmp_path / "back"
    there.mkdir()
    contents = {"a": b"", "b": os.urandom((9 << 20) + 5), "c": b"x", "d": os.urandom(4 << 20), "e": b"y"}
    for name, content in contents.items():
        (there / name).write_bytes(content)
    (there / "b").chmod(0o750)
    os.utime(there / "b", (1_000_000_000, 1_000_000_000))
    assert fetch(session, str(there), str(back), every) == len(contents)
    assert {name: (back / name).read_bytes() for name in contents} == contents
    status = (back / "b").stat()
    assert (status.st_mode & 0o777, status.st_mtime) == (0o750, 1_000_000_000)


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("../x", None),
        ("/tmp/x", None),
        ("a/../../x", None),
        ("link/x", None),
        ("a", "/etc"),
        ("a", ".."),
        ("a/b", "../../x"),
        ("a/b", "c/../../x"),
    ],
)
def test_a_machine_writes_nowhere_else(tmp_path: Path, name: str, link: str | None) -> None:
    """Neither by names nor by links, whether they come now or are there already."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    piece = host_files.Piece(name, 0, 1, 0o600, 0, link)
    with pytest.raises(InputError, match="leads out of"):
        host_files.write_block(str(folder), [piece], b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
    staging = tmp_path / "staging"
    (staging / "link").mkdir(parents=True)
    (staging / "link" / "x").touch()
    with pytest.raises(InputError, match="or through a link in it"):
        host_files.place_files(str(folder), str(staging), is_confined=True)
    assert not (tmp_path / "x").exists()


def test_files_that_cannot_be_placed_here(session: NodeConnection, tmp_path: Path) -> None:
    """A file where a folder should be, or a full disk: one line, and nothing is left of the transfer."""
    there, back = tmp_path / "there", tmp_path / "back"
    (there / "folder").mkdir(parents=True)
    (there / "folder" / "file").touch()
    back.mkdir()
    (back / "folder").write_text("in the way")
    with pytest.raises(InputError) as caught:
        fetch(session, str(there), str(back), every)
    reason = f"[Errno 17] File exists: '{back}/folder'"
    assert str(caught.value) == f"files from here cannot be placed in {back}: {reason}"
    assert [path.name for path in back.iterdir()] == ["folder"]


def test_nothing_takes_its_place_unless_it_may(session: NodeConnection, here: Path, tmp_path: Path) -> None:
    """The folder is looked at again when all has come: by then it may be another job's."""

    def check() -> None:
        raise InputError("it is another's")

    back = tmp_path / "back"
    with pytest.raises(InputError, match="^it is another's$"):
        fetch(session, str(here), str(back), every, check)
    assert list(back.iterdir()) == []


def test_same_folder(session: NodeConnection, here: Path) -> None:
    """Nothing is copied onto itself."""
    assert send(session, Tree(str(here), f"{here}/../{here.name}", ("a b",))) == 0
    assert fetch(session, str(here), str(here), every) == 0
