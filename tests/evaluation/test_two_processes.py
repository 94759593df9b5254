"""Two processes, each with some of the rows or with some of the queries, find what one alone finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dglkge.data.known_triples import KnownTriples
from dglkge.distributed.process_group import end_process_group
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import Protocol
from dglkge.typing import Side
from tests.evaluation.toy_world import RELATIONS, MemoryRows, assert_same, split_rows, toy_world
from tests.simulated_machines import forked

WORLD_SIZE = 2
LIMIT_SECONDS = 120
PROTOCOLS = {"all": Protocol(batch_size=7), "sampled": Protocol(num_candidates=9, batch_size=5)}


def the_world():
    return toy_world("complex", reciprocal=True, num_people=50, num_towns=11, seed=9)


def sum_over_processes(array: np.ndarray) -> np.ndarray:
    summed = torch.from_numpy(array.copy())
    dist.all_reduce(summed)
    return summed.numpy()


def evaluate_on(rank: int, folder: str) -> None:
    """Rank with this process's rows only; rank 1 has no towns at all."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE
    )
    world = the_world()
    shards = {"person": [split_rows(world.tables["person"], WORLD_SIZE)[rank]]}
    if rank == 0:
        shards["town"] = split_rows(world.tables["town"], 1)
    known = KnownTriples([world.known], len(RELATIONS))
    rows, whole = MemoryRows(world.tables), {name: split_rows(world.tables[name], 1) for name in world.tables}
    for name, protocol in PROTOCOLS.items():
        steps: list[int] = []
        evaluator = RankingEvaluator(world.model, RELATIONS, protocol)
        result = evaluator.evaluate(world.triples, known, rows, shards, sum_over_processes)
        turns = (steps.append, (rank, WORLD_SIZE))
        assert_same(evaluator.evaluate(world.triples, known, rows, whole, sum_over_processes, *turns), result)
        if sum(steps) != 2 * len(world.triples):
            raise AssertionError(f"{steps} queries were reported")
        arrays = {f"ranks_{side.value}": result.ranks[side] for side in Side}
        arrays.update({f"negatives_{side.value}": result.num_negatives[side] for side in Side})
        np.savez(Path(folder) / f"{name}_{rank}.npz", **arrays)
    end_process_group()


@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_two_processes_find_what_one_finds(tmp_path):
    processes = [forked(evaluate_on, rank, str(tmp_path)) for rank in range(WORLD_SIZE)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT_SECONDS)
        assert [process.exitcode for process in processes] == [0] * WORLD_SIZE
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    world = the_world()
    known = KnownTriples([world.known], len(RELATIONS))
    for name, protocol in PROTOCOLS.items():
        expected = world.evaluate(protocol, 1, known)
        for rank in range(WORLD_SIZE):
            arrays = np.load(tmp_path / f"{name}_{rank}.npz")
            for side in Side:
                assert np.array_equal(arrays[f"ranks_{side.value}"], expected.ranks[side])
                assert np.array_equal(arrays[f"negatives_{side.value}"], expected.num_negatives[side])
