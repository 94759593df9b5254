"""A save that is killed at any step leaves the version before or the one after, whole."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from dglkge.checkpoint import CheckpointManager, TrainerGroup
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import cut, holds, save_toy, toy_meta, toy_names, toy_tables

FORK = multiprocessing.get_context("fork")
LIMIT_SECONDS = 60


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
