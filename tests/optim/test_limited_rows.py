"""Lengths of rows are limited after each update: over several steps, on one and two trainers."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.kernels.rules import limit_norms
from dglkge.optim.links import limit_norms_plain
from tests.optim.cluster import run_cluster
from tests.optim.oracle import batch, start_rows

NUM_ROWS, DIM, NUM_STEPS, LR, MAX_NORM = 60, 6, 12, 0.3, 0.75


@pytest.mark.parametrize(
    "limit", [limit_norms, lambda rows, most: limit_norms_plain(torch.from_numpy(rows), most)]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_only_longer_rows_are_scaled(limit: Any, dtype: Any) -> None:
    rows = np.array([[3, 4], [0.3, 0.4], [0, 0], [3e30, 4e30]], dtype)
    limit(rows, 1.0)
    np.testing.assert_allclose(rows, [[0.6, 0.8], [0.3, 0.4], [0, 0], [0.6, 0.8]], rtol=1e-6)
    assert rows[1].tolist() == np.array([0.3, 0.4], dtype).tolist()


@functools.cache
def expected() -> torch.Tensor:
    """Adagrad in float64 over the sums of the gradients, then the limit, row by row."""
    rows = start_rows(NUM_ROWS, DIM).double()
    sums = torch.zeros_like(rows)
    for step in range(NUM_STEPS):
        ids, gradients = batch(step, NUM_ROWS, DIM)
        for row in set(ids.tolist()):
            gradient = gradients[ids == row].double().sum(0)
            sums[row] += gradient**2
            rows[row] -= LR * gradient / (sums[row].sqrt() + 1e-10)
            length = math.sqrt(sum(number * number for number in rows[row].tolist()))
            if length > MAX_NORM:
                rows[row] *= MAX_NORM / length
    return rows


@pytest.mark.parametrize(("num_trainers", "num_machines"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_several_steps_on_any_number_of_trainers(num_trainers: int, num_machines: int, kernels: str) -> None:
    results = run_cluster(
        "tests.optim.workers:limited_rows",
        num_trainers,
        num_machines=num_machines,
        num_nodes={"item": 24, "user": NUM_ROWS},
        arguments={
            "dim": DIM,
            "lr": LR,
            "max_norm": MAX_NORM,
            "num_steps": NUM_STEPS,
            "kernels": [kernels] * num_trainers,
        },
    )
    lengths = expected().norm(dim=1)
    assert ((lengths - MAX_NORM).abs() < 1e-9).sum() > 10 and (lengths < 0.9 * MAX_NORM).sum() > 3
    for rows in results:
        torch.testing.assert_close(rows.double(), expected(), rtol=1e-5, atol=1e-5)
