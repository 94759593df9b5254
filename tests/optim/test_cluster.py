"""Every optimizer and option in real DGL clusters, against the float64 oracle, for many layouts of
trainers."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.optim.cluster import run_cluster
from tests.optim.oracle import CASES, Case, Oracle, batch

NUM_STEPS = 60
"""Twice what :func:`tests.optim.workers.all_cases` goes through: its ways of a step repeat after 30."""

MANY_STEPS = 300
"""In two layouts: buffers are used again and again, and rounding adds up."""

NUM_NODES = {"item": 24, "user": 60}
NUM_ROWS = {"user": 60, "next_item": 25}
"""Rows of a table over nodes and of one over edges."""

TABLES = [("user", 6), ("next_item", 3)]


@functools.cache
def expected(label: str, kind: str, dim: int, num_steps: int) -> Oracle:
    """The oracle after all steps; the same for every cluster."""
    case = next(case for case in CASES if case.label == label)
    oracle = Oracle(case, NUM_ROWS[kind], dim)
    for step in range(num_steps):
        oracle.step(*batch(step, NUM_ROWS[kind], dim))
    return oracle


def compare(case: Case, results: list[dict], num_steps: int = NUM_STEPS) -> None:
    for result in results:
        for (kind, dim), (rows, state) in zip(TABLES, result[case.label]):
            oracle = expected(case.label, kind, dim, num_steps)
            torch.testing.assert_close(rows.double(), oracle.rows, rtol=1e-5, atol=1e-5)
            assert sorted(state) == sorted(oracle.state)
            for key, value in state.items():
                torch.testing.assert_close(value.double(), oracle.state[key], rtol=1e-5, atol=1e-5)
        assert result["leaks", case.label] == [0, 0]


@pytest.mark.parametrize(
    ("num_trainers", "num_servers", "num_machines", "num_steps"),
    [
        (1, 1, 1, NUM_STEPS),
        (2, 1, 1, MANY_STEPS),
        (4, 2, 1, NUM_STEPS),
        (2, 1, 2, NUM_STEPS),
        (3, 2, 2, MANY_STEPS),
    ],
)
def test_rows_and_state_match_the_oracle(num_trainers, num_servers, num_machines, num_steps):
    """All steps of every case; the oracle knows nothing of trainers, so all layouts give the same rows."""
    results = run_cluster(
        "tests.optim.workers:all_cases",
        num_trainers,
        num_servers=num_servers,
        num_machines=num_machines,
        num_nodes=NUM_NODES,
        arguments={"tables": TABLES, "num_steps": num_steps},
    )
    assert len(results) == num_trainers
    for case in CASES:
        compare(case, results, num_steps)
    sent = [result["sent_bytes"] for result in results]
    assert all(sent) if num_trainers > 1 else sent == [0]


def test_without_shared_memory() -> None:
    """On systems that cannot share memory the same rows come through the network, with more bytes."""
    results = run_cluster(
        "tests.optim.workers:all_cases",
        2,
        num_nodes=NUM_NODES,
        arguments={"tables": TABLES, "num_steps": NUM_STEPS, "num_cases": 2, "shared_memory": False},
    )
    for case in CASES[:2]:
        compare(case, results)
    assert all(result["sent_bytes"] for result in results)
