"""Every optimizer and option in real DGL clusters, against the float64 oracle."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.optim.cluster import run_cluster
from tests.optim.oracle import CASES, Oracle, batch

NUM_STEPS, MANY_STEPS = 60, 300
"""Ways of a step repeat after 30; in two layouts buffers are used again and again, and rounding adds up."""

NUM_ROWS = {"user": 60, "next_item": 25}
TABLES = [("user", 6), ("next_item", 3)]


@functools.cache
def expected(label: str, kind: str, dim: int, num_steps: int) -> Oracle:
    case = next(case for case in CASES if case.label == label)
    oracle = Oracle(case, NUM_ROWS[kind], dim)
    for step in range(num_steps):
        oracle.step(*batch(step, NUM_ROWS[kind], dim))
    return oracle


@pytest.mark.parametrize(
    ("num_trainers", "num_servers", "num_machines", "num_steps", "more"),
    [
        (1, 1, 1, NUM_STEPS, {}),
        (2, 1, 1, MANY_STEPS, {}),
        # Trainers with compiled loops understand those with the plain twins.
        (4, 2, 1, NUM_STEPS, {"kernels": ["auto", "reference"]}),
        (2, 1, 2, NUM_STEPS, {"kernels": ["reference"]}),
        (3, 2, 2, NUM_STEPS, {}),
        # On systems that cannot share memory all goes through the network.
        (2, 1, 1, NUM_STEPS, {"num_cases": 2, "shared_memory": False}),
    ],
    ids=str,
)
def test_rows_and_state_match_the_oracle(num_trainers, num_servers, num_machines, num_steps, more) -> None:
    """All steps of every case; the oracle knows nothing of trainers, so all layouts give the same rows."""
    arguments = {"tables": TABLES, "num_steps": num_steps, **more}
    layout = {"num_servers": num_servers, "num_machines": num_machines}
    results = run_cluster("all_cases", num_trainers, **layout, arguments=arguments)
    for result in results:
        for case in CASES[: more.get("num_cases")]:
            for (kind, dim), (rows, state) in zip(TABLES, result[case.label]):
                oracle = expected(case.label, kind, dim, num_steps)
                torch.testing.assert_close(rows.double(), oracle.rows, rtol=1e-5, atol=1e-5)
                assert sorted(state) == sorted(oracle.state)
                for key, value in state.items():
                    torch.testing.assert_close(value.double(), oracle.state[key], rtol=1e-5, atol=1e-5)
            assert result["leaks", case.label] == [0, 0]
        assert (result["sent_bytes"] > 0) == (num_trainers > 1)
