"""What can go wrong with a checkpoint, and what the next start does: the table in docs/checkpoints.md.

Each row starts from version 1, kept as epoch_1, and version 2, the newest.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from dglkge.checkpoint import CheckpointManager, TrainerGroup, open_checkpoint
from dglkge.checkpoint import part_files as row_stream
from dglkge.checkpoint.manager import fall_back
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.errors import CheckpointError, StorageError
from dglkge.typing import RELATION
from tests.checkpoint.test_faults import run
from tests.checkpoint.toy_checkpoint import cut, flip, holds, names_are_right, toy_meta, toy_names, toy_tables
from tests.toy_kg import REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "checkpoints.md"
EMBEDDINGS = "v2/embeddings_person_0.v2.h5"
META = toy_meta()
TABLES = {seed: toy_tables(META, seed) for seed in (1, 2, 3, 4)}


def save(path, seed, name=None, num_parts=1):
    """Save in the background, and change the live rows meanwhile."""
    manager = CheckpointManager(path, TrainerGroup(limit_seconds=0.1), toy_names(META))
    parts = cut("person", toy_tables(META, seed)["person"], num_parts, seed)
    relations = cut(RELATION, TABLES[seed][RELATION], 1)[0]
    version = manager.start(parts, relations, META, {name: {}} if name else {})
    for part in parts:
        part.rows.fill_(7)
    manager.finish()
    return version


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A checkpoint at version 2, of which version 1 is kept."""
    path = tmp_path_factory.mktemp("start") / "checkpoint"
    save(path, 1, "epoch_1")
    save(path, 2)
    return path


def next_start(path: Path) -> str:
    """Do what a run does when it starts, without and with the fallback; say what happened."""
    try:
        latest = CheckpointManager(path).latest()
        part = cut("person", TABLES[4]["person"], 1)[0]
        if latest is None:
            return "starts anew"
        CheckpointManager(path).restore([part], cut(RELATION, TABLES[4][RELATION], 1)[0])
        return f"goes on from version {holds(path, META, TABLES)}"
    except CheckpointError as error:
        named = re.search(rf"{path}/(?:v\d+/)?([\w.]+)", str(error))[1]
        before = sorted(os.listdir(path))
        assert "newest good version" in str(error) or "its checksum is not" in str(error)
        assert sorted(os.listdir(path)) == before
    good = fall_back(CheckpointStorage(path), toy_names(META))
    holds(path, META, TABLES)
    assert save(path, 3) == good + 1
    holds(path, META, {good + 1: TABLES[3]})
    return f"error that names {named}; with the fallback goes on from version {good}"


def foreign(path: Path) -> None:
    (path / "notes.txt").write_text("x")
    (path / "embeddings").mkdir()


def exchange_lines(path: Path) -> None:
    """Exchange two lines of as many bytes."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[1], lines[0], *lines[2:]]))


DAMAGES = {
    "version file empty": lambda path: (path / "checkpoint_version.txt").write_text(""),
    "version file garbled": lambda path: (path / "checkpoint_version.txt").write_bytes(b"\xff\x00"),
    "version file gone": lambda path: (path / "checkpoint_version.txt").unlink(),
    "version file names a version that is not there": lambda path: (
        path / "checkpoint_version.txt"
    ).write_text("9\n"),
    "rows cut off": lambda path: os.truncate(path / EMBEDDINGS, 2000),
    "rows gone": lambda path: (path / EMBEDDINGS).unlink(),
    "one bit of the rows flipped": lambda path: flip(path / EMBEDDINGS, 2500),
    "one bit of the relations flipped": lambda path: flip(path / "v2" / "model.v2.h5", 2500),
    "one bit of the manifest flipped": lambda path: flip(path / "v2" / "manifest.json", 200),
    "manifest gone": lambda path: (path / "v2" / "manifest.json").unlink(),
    "one bit of config.json flipped": lambda path: flip(path / "v2" / "config.json", 200),
    "two lines of a vocabulary exchanged": lambda path: exchange_lines(path / "v2" / "vocabulary_person.txt"),
    "names of entities gone": lambda path: (path / "v2" / "entity_names_person_0.json").unlink(),
    "files of another project beside it": foreign,
}


def documented(fault: str) -> str:
    rows = [line.strip("| \n").split(" | ") for line in DOCUMENT.read_text(encoding="utf-8").splitlines()]
    return next((row[1].strip() for row in rows if len(row) == 2 and row[0].strip() == fault), "nothing")


def hold(fault: str, outcome: str) -> None:
    """Print a row of the table, and hold it against the document."""
    print(f"| {fault} | {outcome} |")
    assert documented(fault) == outcome


@pytest.mark.parametrize("fault", DAMAGES)
def test_damage(start, tmp_path, fault):
    path = tmp_path / "checkpoint"
    shutil.copytree(start, path, symlinks=True)
    DAMAGES[fault](path)
    hold(fault, next_start(path))


def test_a_folder_of_another_project(tmp_path):
    foreign(tmp_path)
    hold("a folder of another project, no checkpoint", next_start(tmp_path))
    assert save(tmp_path, 1) == 1 and (tmp_path / "notes.txt").read_text() == "x"


def save_and_die(path, version, step):
    """Save a version, kept by its number, and end by SIGKILL before the step of that number."""
    done = 0

    def deadly(function):
        def wrapped(*arguments, **options):
            nonlocal done
            done += 1
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapped

    for name in ("pwrite", "replace", "fsync", "mkdir", "symlink", "link", "unlink", "rmdir"):
        setattr(os, name, deadly(getattr(os, name)))
    row_stream.fill_rows = deadly(row_stream.fill_rows)
    save(path, version, f"epoch_{version}", num_parts=2)


@pytest.mark.parametrize("saved", [1, 3])
def test_kill_at_every_step(start, tmp_path, saved):
    """Of the first save before every other step. Of a later one, where one part becomes two: before each."""
    versions = []
    for step in range(1, 1000, 1 if saved == 3 else 2):
        path = tmp_path / "checkpoint"
        shutil.rmtree(path, ignore_errors=True)
        if saved == 3:
            shutil.copytree(start, path, symlinks=True)
        exit_code = run(save_and_die, path, saved, step)
        outcome = next_start(path)
        version = 0 if outcome == "starts anew" and saved == 1 else int(outcome.split()[-1])
        assert not version or outcome == f"goes on from version {version}"
        if version:
            names_are_right(open_checkpoint(path).folder)
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
        versions.append(version)
        assert save(path, 4, "epoch_4") == version + 1
        holds(path, META, {version + 1: TABLES[4]})
        names_are_right(path / "latest")
        if saved == 3:
            holds(path / "epoch_1", META, TABLES)
            names_are_right(open_checkpoint(path / "epoch_1").folder)
        assert version < saved or open_checkpoint(path / f"epoch_{saved}").version == saved
        assert not list(path.rglob("*.tmp")) and not list(path.rglob("*.receipt.json"))
    assert len(versions) > (40 if saved == 3 else 10)
    assert versions == sorted(versions) and set(versions) == {saved - 1, saved}
    fault = "kill -9 before each step of saving version 3"
    assert saved == 1 or documented(fault) == "goes on from version 2 or 3, whichever is whole"


def save_and_say(path, seed):
    """Save; end with 9 where the disk is full."""
    try:
        save(path, seed)
    except StorageError as error:
        os._exit(9 if "No space left" in str(error) or "cannot write" in str(error) else 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small tmpfs")
def test_a_full_disk(start, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"this container may not mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        path, filler = disk / "checkpoint", disk / "filler"
        shutil.copytree(start, path, symlinks=True)
        failed = 0
        for pages_left in range(12):
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            filler.write_bytes(b"x" * max(0, free - 4096 * pages_left))
            exit_code = run(save_and_say, path, 3)
            assert exit_code in (0, 9)
            failed += exit_code == 9
            version = holds(path, META, {2: TABLES[2], 3: TABLES[3]})
            filler.unlink()
            if exit_code == 0:
                break
            assert version == 2
        assert failed > 1
        assert save(path, 3) == version + 1
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # files of it are still mapped here
    hold("disk full", "the save fails with an error that names the file; goes on from version 2")
