"""Names, counts and config.json belong to a version: checked like rows, never those of another version."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import zlib
from pathlib import Path

import h5py
import pytest

from dglkge.checkpoint import CheckpointManager, open_checkpoint
from dglkge.checkpoint import part_files as row_stream
from dglkge.checkpoint.manager import fall_back
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.cli.main import main
from dglkge.errors import CheckpointError
from dglkge.typing import RELATION
from tests.checkpoint.killing import die_at_step
from tests.checkpoint.test_faults import run as run_apart
from tests.checkpoint.toy_checkpoint import cut, save_toy, toy_meta, toy_names, toy_tables

META = toy_meta()
TABLES = toy_tables(META)
TEXTS = [
    "checkpoint_version.txt",
    "config.json",
    "dynamic_rel_count.txt",
    "dynamic_rel_names.json",
    "entity_count_person_0.txt",
    "entity_count_person_1.txt",
    "entity_names_person_0.json",
    "entity_names_person_1.json",
    "vocabulary_person.txt",
]


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch):
    """SIGKILL spares the page cache, so nothing here depends on it being written out."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def save(path, num_parts, seed, name=None):
    """Save all parts by one process, cut as the seed says."""
    manager = CheckpointManager(path, 0, True, lambda: None, toy_names(META), num_parts, limit_seconds=2)
    parts = cut("person", TABLES["person"], num_parts, seed)
    notes = {name: {}} if name else {}
    return manager.save(parts, cut(RELATION, TABLES[RELATION], 1)[0], META, notes)


def names_are_right(folder: Path) -> None:
    """Hold what PyTorch-BigGraph reads against the ids in the files of a version."""
    version = int((folder / "checkpoint_version.txt").read_text())
    parts = sorted(folder.glob(f"embeddings_person_*.v{version}.h5"))
    config = json.loads((folder / "config.json").read_text())
    assert config["entities"]["person"]["num_partitions"] == len(parts)
    for part, path in enumerate(parts):
        with h5py.File(path) as file:
            ids = file["original_ids"][:].tolist()
        names = json.loads((folder / f"entity_names_person_{part}.json").read_text())
        assert names == [f"person-{id_}" for id_ in ids]
        assert (folder / f"entity_count_person_{part}.txt").read_text() == f"{len(ids)}\n"
    for pattern in ("entity_names_*.json", "entity_count_*.txt"):
        assert len(list(folder.glob(pattern))) == len(parts)


def save_and_die(path, num_parts, step):
    names = ("pwrite", "replace", "rename", "link", "symlink", "unlink", "mkdir", "rmdir")
    die_at_step(step, [*((os, name) for name in names), (Path, "unlink"), (row_stream, "fill_rows")])
    save(path, num_parts, seed=2, name="epoch_2")


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_a_crash_between_two_partitionings_never_leaves_wrong_names(tmp_path, num_parts):
    """Two parts become one, two others or three; the process is killed before each of its steps."""
    save(tmp_path / "start", 2, seed=1, name="epoch_1")
    for step in range(1, 1000):
        path = tmp_path / "run"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "start", path, symlinks=True)
        exit_code = run_apart(save_and_die, path, num_parts, step)
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        names_are_right(checkpoint.folder)
        kept = open_checkpoint(path / "epoch_1")
        kept.verify()
        names_are_right(kept.folder)
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
        assert save(path, 2, seed=3) == checkpoint.version + 1
        names_are_right(path / "latest")
        assert checkpoint.version == 1 or open_checkpoint(path / "epoch_2").version == 2
    assert step > 30
    assert not list(path.rglob("*.tmp"))


def test_names_of_the_version_that_is_gone_back_to(tmp_path):
    save(tmp_path, 2, seed=1, name="epoch_1")
    save(tmp_path, 3, seed=2)
    (tmp_path / "v2" / "model.v2.h5").write_bytes(b"")
    assert fall_back(CheckpointStorage(tmp_path)) == 1
    names_are_right(tmp_path / "latest")
    open_checkpoint(tmp_path).verify()


def test_every_file_of_a_version_is_in_its_manifest(tmp_path):
    save(tmp_path, 2, seed=1)
    save(tmp_path, 2, seed=1)
    body = json.loads((tmp_path / "v2" / "manifest.json").read_text())
    texts = [*body["texts"], *(text for entry in body["files"] for text in entry["texts"])]
    assert sorted(text["name"] for text in texts) == TEXTS
    for text in texts:
        content = (tmp_path / "v2" / text["name"]).read_bytes()
        assert (text["size_bytes"], text["crc32"]) == (len(content), zlib.crc32(content))


def test_texts_that_stay_the_same_are_not_written_again(tmp_path):
    save(tmp_path, 2, seed=1)
    before = inodes(tmp_path)
    save(tmp_path, 2, seed=1)
    after = inodes(tmp_path)
    # PyTorch-BigGraph writes into these two.
    changed = {name for name in TEXTS if after[name] != before[name]}
    assert changed == {"checkpoint_version.txt", "config.json"}
    save(tmp_path, 2, seed=2)
    assert {name for name, inode in inodes(tmp_path).items() if inode != after[name]} == {
        "checkpoint_version.txt",
        "config.json",
        "entity_names_person_0.json",
        "entity_names_person_1.json",
        "entity_count_person_0.txt",
        "entity_count_person_1.txt",
    }


def inodes(folder: Path) -> dict[str, int]:
    """Return the inodes of the texts of the newest version."""
    return {name: (folder / "latest" / name).stat().st_ino for name in TEXTS}


def test_texts_are_copied_where_a_disk_has_no_hard_links(tmp_path, monkeypatch):
    save(tmp_path, 2, seed=1, name="epoch_1")

    def failing(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", failing)
    before = inodes(tmp_path)
    save(tmp_path, 2, seed=1)
    assert not set(inodes(tmp_path).values()) & set(before.values())
    names_are_right(tmp_path / "latest")
    open_checkpoint(tmp_path).verify()
    open_checkpoint(tmp_path / "epoch_1").verify()


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_is_removed_while_a_run_trains_is_written_with_the_next_version(tmp_path, name):
    """Hours of training do not end for want of a file that the next version writes anyway."""
    save(tmp_path, 2, seed=1)
    content = (tmp_path / "v1" / name).read_bytes()
    (tmp_path / "v1" / name).unlink()
    assert save(tmp_path, 2, seed=1) == 2
    if name not in ("checkpoint_version.txt", "config.json"):
        assert (tmp_path / "v2" / name).read_bytes() == content
    open_checkpoint(tmp_path).verify()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "checkpoint"
    save_toy(path, META, TABLES, 2)
    return path


def flips(path: Path, number: int) -> list[int]:
    """Choose places of a file, the first and the last byte among them."""
    size = path.stat().st_size
    return sorted({0, size - 1, *random.Random(5).choices(range(size), k=number)})


@pytest.mark.parametrize("name", TEXTS)
def test_every_flip_is_refused(whole, tmp_path, name, capsys):
    path = tmp_path / "checkpoint"
    shutil.copytree(whole, path)
    content = (path / "v1" / name).read_bytes()
    commands = (["inspect", str(path), "--verify"], ["similar", str(path), "--entity", "person-1"])
    for place in flips(path / "v1" / name, 20):
        changed = bytearray(content)
        changed[place] ^= 1
        (path / "v1" / name).write_bytes(changed)
        for command in commands:
            assert main(command) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and f"{name} is damaged: its checksum is not" in error
        with pytest.raises(CheckpointError, match=f"{name} is damaged: its checksum"):
            CheckpointManager(path, 0, True, lambda: None).restore([])
    (path / "v1" / name).write_bytes(content)
    assert main(commands[0]) == 0


def test_permuted_names_are_refused(whole, tmp_path, capsys):
    path = tmp_path / "checkpoint"
    shutil.copytree(whole, path)
    file = path / "v1" / "vocabulary_person.txt"
    lines = file.read_text().splitlines(keepends=True)
    for number in range(20):
        changed = lines[:]
        changed[number], changed[number + 1] = changed[number + 1], changed[number]
        file.write_text("".join(changed))
        assert main(["similar", str(path), "--entity", "person-1"]) == 2
        assert "vocabulary_person.txt is damaged: its checksum" in capsys.readouterr().err
        assert main(["similar", str(path), "--entity", "person-1", "--no-verify"]) == 0
        capsys.readouterr()


@pytest.mark.parametrize("name", ["embeddings_person_0.v1.h5", "embeddings_person_1.v1.h5", "model.v1.h5"])
def test_flips_in_rows_are_refused(whole, tmp_path, name, capsys):
    """Nothing but a checksum can find these: the numbers are other numbers."""
    path = tmp_path / "checkpoint"
    shutil.copytree(whole, path)
    content = (path / "v1" / name).read_bytes()
    place = content.index(TABLES["person"].rows[7].numpy().tobytes()) if "person_0" in name else 3000
    for offset in range(5):
        changed = bytearray(content)
        changed[place + offset] ^= 4
        (path / "v1" / name).write_bytes(changed)
        command = ["predict", str(path), "--head", "person-1", "--relation", "likes", "--known", "keep"]
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"{name} is damaged: its checksum is not the one" in error
        assert main(["export", str(path), "--format", "npy", "--output", str(tmp_path / "out")]) == 2
        assert f"{name} is damaged" in capsys.readouterr().err


def test_a_text_that_is_gone_is_refused_and_the_fallback_writes_it_anew(whole, tmp_path):
    for name in TEXTS:
        path = tmp_path / name / "checkpoint"
        shutil.copytree(whole, path)
        content = (path / "v1" / name).read_bytes()
        (path / "v1" / name).unlink()
        advice = "the newest good version is 1: set checkpoint.fallback=true"
        with pytest.raises(CheckpointError, match=f"{name} is missing; {advice}"):
            open_checkpoint(path)
        (path / "v1" / name).write_bytes(b"x" * len(content))
        assert fall_back(CheckpointStorage(path), toy_names(META)) == 1
        assert (path / "v1" / name).read_bytes() == content
        assert (path / "damaged_v1" / name).read_bytes() == b"x" * len(content)
        open_checkpoint(path).verify()
