"""Merging rows without moving them, against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.optim.row_chains import GradientRows, PlainRows
from dglkge.optim.workspace import Scratch

pytestmark = pytest.mark.parametrize("kind", [GradientRows, PlainRows])


def merged(chains: GradientRows, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    rows = torch.empty(chains.num_keys, chains.dim, dtype=dtype)
    counts = np.empty(chains.num_keys, np.int64)
    chains.merge_into(np.arange(chains.num_keys), rows, counts, Scratch())
    return rows.double().numpy(), counts


@pytest.mark.parametrize(("num_ids", "num_rows"), [(0, 5), (700, 40), (9000, 2**40)])
def test_sums_of_equal_ids(kind: type[GradientRows], num_ids: int, num_rows: int) -> None:
    """Several sources of strided rows, far more than the first capacity, ids beyond 32 bits."""
    rng = np.random.default_rng(num_ids)
    chains = kind(3, np.dtype(np.float32))
    for _ in range(2):  # the second time in the same arrays
        chains.clear()
        sums: dict[int, np.ndarray] = {}
        numbers: dict[int, int] = {}
        for stride in (3, 8):
            ids = rng.integers(0, num_rows, num_ids)
            rows = (rng.integers(-9, 9, (num_ids, stride)) / 4).astype(np.float32)[:, :3]
            weights = rng.integers(1, 4, num_ids)
            chains.add(ids, rows, weights)
            for key, row, weight in zip(ids.tolist(), rows, weights):
                sums[key] = sums.get(key, 0) + row.astype(np.float64)
                numbers[key] = numbers.get(key, 0) + int(weight)
        assert list(sums) == chains.keys.tolist()  # in order of first appearance
        rows64, counts = merged(chains, torch.float32)
        assert counts.tolist() == list(numbers.values())
        assert rows64.tolist() == [row.tolist() for row in sums.values()]
        owners, shared = np.zeros((2, chains.num_keys), np.int64)
        keys = np.array([*list(sums)[:5], num_rows + 1])
        places = chains.match(keys, 0, 1, owners, shared.astype(bool))
        assert places.tolist() == [*range(min(5, len(sums))), -1]


def test_sums_may_be_written_in_a_narrow_type(kind: type[GradientRows]) -> None:
    chains = kind(2, np.dtype(np.float32))
    chains.add(np.array([8, 9]), np.array([[1.001, 100.3], [1, 2]], np.float32))
    assert merged(chains, torch.bfloat16)[0].tolist() == [[1.0, 100.5], [1.0, 2.0]]
