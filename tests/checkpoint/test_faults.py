"""A save that is killed at any step leaves the version before or the one after, whole."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from dglkge.checkpoint import CheckpointManager, TrainerGroup
from dglkge.checkpoint import part_files as row_stream
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.typing import RELATION
from tests.checkpoint.killing import die_at_step
from tests.checkpoint.toy_checkpoint import cut, holds, save_alone, save_toy, toy_meta, toy_names, toy_tables

FORK = multiprocessing.get_context("fork")
LIMIT_SECONDS = 60


def save_and_die(path, meta, tables, step):
    """Save as one process and end by SIGKILL before the call of that number that changes or syncs a file."""
    calls = [(os, name) for name in ("pwrite", "replace", "fsync", "mkdir")]
    die_at_step(step, [*calls, (Path, "unlink"), (row_stream, "fill_rows")])
    save_alone(path, meta, tables)


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


def test_kills_during_the_first_save(tmp_path):
    """Before every other step; the test of the documented faults has every step of a later save."""
    meta = toy_meta()
    first, second = toy_tables(meta, 1), toy_tables(meta, 2)
    seen = []
    for step in range(1, 1000, 2):
        path = tmp_path / f"step{step}"
        exit_code = run(save_and_die, path, meta, first, step)
        published = CheckpointStorage(path).published()
        version = published.version if published else 0
        if version:
            holds(path, meta, {1: first})
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
        seen.append(version)
        assert save_alone(path, meta, second) == version + 1
        holds(path, meta, {version + 1: second})
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
    manager = CheckpointManager(path, TrainerGroup(rank, barrier=wait), toy_names(meta), num_parts=2)
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
    version = holds(tmp_path, meta, {1: first, 2: second})
    assert version == (2 if fatal_barrier == 4 else 1)
    assert save_toy(tmp_path, meta, second, 3) == version + 1
