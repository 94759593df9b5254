"""Names, counts and config.json belong to a version: checked like rows, never those of another version."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from dglkge.checkpoint import CheckpointManager, TrainerGroup, open_checkpoint
from dglkge.checkpoint.manager import fall_back
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.cli.main import main
from dglkge.errors import CheckpointError
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import (
    cut,
    flip,
    names_are_right,
    save_toy,
    toy_meta,
    toy_names,
    toy_tables,
)

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


def save(path, num_parts, seed, name=None):
    """Save all parts by one process, cut as the seed says."""
    manager = CheckpointManager(path, TrainerGroup(limit_seconds=2), toy_names(META), num_parts)
    parts = cut("person", TABLES["person"], num_parts, seed)
    notes = {name: {}} if name else {}
    return manager.save(parts, cut(RELATION, TABLES[RELATION], 1)[0], META, notes)


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


@pytest.mark.parametrize("name", ["config.json", "entity_count_person_1.txt", "vocabulary_person.txt"])
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


def test_flips_in_texts_are_refused(whole, tmp_path, capsys):
    path = tmp_path / "checkpoint"
    shutil.copytree(whole, path)
    commands = (["inspect", str(path), "--verify"], ["similar", str(path), "--entity", "person-1"])
    for name in TEXTS:
        for place in (0, -1):
            flip(path / "v1" / name, place)
            for command in commands:
                assert main(command) == 2
                error = capsys.readouterr().err
                assert error.count("\n") == 1 and f"{name} is damaged: its checksum is not" in error
            with pytest.raises(CheckpointError, match=f"{name} is damaged: its checksum"):
                CheckpointManager(path).restore([])
            if name == "vocabulary_person.txt" and place == 0:
                assert main([*commands[1][:2], "--entity", "person-3", "--no-verify"]) == 0
            flip(path / "v1" / name, place)
    assert main(commands[0]) == 0


@pytest.mark.parametrize("name", ["embeddings_person_0.v1.h5", "embeddings_person_1.v1.h5", "model.v1.h5"])
def test_flips_in_rows_are_refused(whole, tmp_path, name, capsys):
    """Nothing but a checksum can find these: the numbers are other numbers."""
    path = tmp_path / "checkpoint"
    shutil.copytree(whole, path)
    flip(path / "v1" / name, 3000)
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
