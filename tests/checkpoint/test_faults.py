"""A save that is killed at any step leaves the version before or the one after, whole."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest

from dglkge.checkpoint import CheckpointManager, open_checkpoint
from dglkge.checkpoint import part_files as row_stream
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.errors import StorageError
from dglkge.typing import RELATION
from tests.checkpoint.killing import die_at_step
from tests.checkpoint.toy_checkpoint import cut, save_toy, toy_meta, toy_names, toy_tables

FORK = multiprocessing.get_context("fork")
LIMIT_SECONDS = 60


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch):
    """SIGKILL spares the page cache, so nothing here depends on it being written out."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def save_and_die(path, meta, tables, step):
    """Save as one process and end by SIGKILL before the call of that number that changes or syncs a file."""
    calls = [(os, name) for name in ("pwrite", "replace", "fsync", "mkdir")]
    die_at_step(step, [*calls, (Path, "unlink"), (row_stream, "fill_rows")])
    save_alone(path, meta, tables)


def save_alone(path, meta, tables):
    """Save every table as one part."""
    parts = [cut(entity_type, tables[entity_type], 1)[0] for entity_type in meta.entity_types]
    manager = CheckpointManager(path, 0, True, lambda: None, toy_names(meta))
    return manager.save(parts, cut(RELATION, tables[RELATION], 1)[0], meta)


def run(target, *arguments):
    """Run a function in a process of its own and return its exit code."""
    process = FORK.Process(target=target, args=arguments)
    process.start()
    process.join(LIMIT_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail("a save hung")
    return process.exitcode


def check_whole(path, meta, tables_of_version):
    """Check that the published version is one of those given, with its rows and checksums; return it."""
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    tables = tables_of_version[checkpoint.version]
    for table in [*meta.entity_types, RELATION]:
        assert checkpoint[table][:].numpy().tobytes() == tables[table].rows.numpy().tobytes()
    return checkpoint.version


def test_kill_at_every_step_of_a_later_save(tmp_path):
    meta = toy_meta()
    first, second, third = (toy_tables(meta, seed) for seed in range(3))
    save_alone(tmp_path / "start", meta, first)
    seen = []
    for step in range(1, 1000):
        path = tmp_path / f"step{step}"
        shutil.copytree(tmp_path / "start", path, symlinks=True)
        exit_code = run(save_and_die, path, meta, second, step)
        version = check_whole(path, meta, {1: first, 2: second})
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
        seen.append(version)
        assert save_alone(path, meta, third) == version + 1
        assert check_whole(path, meta, {version + 1: third}) == version + 1
        leavings = [p.name for p in path.rglob("*") if p.name.endswith((".tmp", ".receipt.json"))]
        assert not leavings
        assert [p.name for p in path.glob("v*")] == [f"v{version + 1}"]
    assert version == 2 and exit_code == 0
    assert len(seen) > 25
    assert seen == sorted(seen) and set(seen) == {1, 2}


def test_kill_at_every_step_of_the_first_save(tmp_path):
    meta = toy_meta()
    first, second = toy_tables(meta, 1), toy_tables(meta, 2)
    seen = []
    for step in range(1, 1000):
        path = tmp_path / f"step{step}"
        exit_code = run(save_and_die, path, meta, first, step)
        published = CheckpointStorage(path).published()
        version = published.version if published else 0
        if version:
            check_whole(path, meta, {1: first})
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
        seen.append(version)
        assert save_alone(path, meta, second) == version + 1
        check_whole(path, meta, {version + 1: second})
    assert version == 1
    assert seen == sorted(seen) and set(seen) == {0, 1}


def save_as_one_of_two(path, meta, tables, rank, barrier, fatal_barrier):
    """Save as one of two machines; die at the given barrier instead of entering it."""
    entered = 0

    def wait():
        nonlocal entered
        entered += 1
        if entered == fatal_barrier:
            os.kill(os.getpid(), signal.SIGKILL)
        barrier.wait(LIMIT_SECONDS)

    parts = [cut(entity_type, tables[entity_type], 2)[rank] for entity_type in meta.entity_types]
    manager = CheckpointManager(path, rank, True, wait, toy_names(meta), num_parts=2)
    manager.save(parts, cut(RELATION, tables[RELATION], 1)[0] if rank == 0 else None, meta)


@pytest.mark.parametrize("fatal_rank", [0, 1])
@pytest.mark.parametrize("fatal_barrier", [1, 2, 3, 4])
def test_kill_one_of_two_machines(tmp_path, fatal_rank, fatal_barrier):
    meta = toy_meta()
    first, second = toy_tables(meta, 1), toy_tables(meta, 2)
    save_toy(tmp_path, meta, first, 2)
    barrier = FORK.Barrier(2)
    machines = [
        FORK.Process(
            target=save_as_one_of_two,
            args=(tmp_path, meta, second, rank, barrier, fatal_barrier if rank == fatal_rank else 0),
        )
        for rank in (0, 1)
    ]
    for machine in machines:
        machine.start()
    machines[fatal_rank].join(LIMIT_SECONDS)
    barrier.abort()  # what the launcher does when it sees the death
    machines[1 - fatal_rank].join(LIMIT_SECONDS)
    try:
        assert machines[fatal_rank].exitcode == -signal.SIGKILL
        assert machines[1 - fatal_rank].exitcode == 1
    finally:
        for machine in machines:
            machine.kill()
            machine.join()
    # Rank 0 publishes before it enters the fourth barrier; with fewer passed, nothing counts yet.
    version = check_whole(tmp_path, meta, {1: first, 2: second})
    assert version == (2 if fatal_barrier == 4 else 1)
    assert save_toy(tmp_path, meta, second, 3) == version + 1


def test_a_failing_write_leaves_the_version_before(tmp_path, monkeypatch):
    meta = toy_meta()
    first = toy_tables(meta, 1)
    save_alone(tmp_path, meta, first)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_stream, "fill_rows", full)
    with pytest.raises(
        StorageError, match="cannot write .*embeddings_person_0.v2.h5: No space left on device"
    ):
        save_alone(tmp_path, meta, toy_tables(meta, 2))
    assert check_whole(tmp_path, meta, {1: first}) == 1
    assert not list(tmp_path.rglob("*.tmp"))
