"""Sums of equal rows by kernels for a GPU, run by Triton's interpreter, against sums in float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dglkge.optim import row_sums
from tests.toy_kg import REPOSITORY

SCRIPT = """
import torch
from dglkge.optim.row_sums import COLUMNS, LENGTH, sum_in_order
random = torch.Generator().manual_seed(1)
for num, num_sums, width in [(1, 1, 1), (5, 5, 3), (LENGTH, 1, 2), (3 * LENGTH + 7, 1, 4), (3 * LENGTH, 3, 5),
                             (5 * LENGTH + 1, 40, COLUMNS + 3), (4 * LENGTH, 4 * LENGTH, 2)]:
    # Skewed, and every sum has a row: runs that end with a block, and runs over several.
    more = (torch.rand(num - num_sums, generator=random) ** 4 * num_sums).long()
    places = torch.cat([torch.arange(num_sums), more])[torch.randperm(num, generator=random)]
    rows = torch.randn(num, width, generator=random)
    expected = torch.zeros(num_sums, width, dtype=torch.float64).index_add_(0, places, rows.double())
    torch.testing.assert_close(sum_in_order(rows, places, num_sums).double(), expected, rtol=1e-5, atol=1e-5)
assert sum_in_order(torch.empty(0, 3), torch.empty(0, dtype=torch.int64), 0).shape == (0, 3)
print("equal")
"""


@pytest.mark.skipif(row_sums.triton is None, reason="no Triton here")
def test_kernels_give_the_sums() -> None:
    """Runs that begin, end and go on at the borders of blocks."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=REPOSITORY,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"


def test_plain_twin() -> None:
    rows, places = torch.randn(50, 3, dtype=torch.float64), torch.arange(50) % 7
    expected = torch.stack([rows[places == place].sum(0) for place in range(7)])
    torch.testing.assert_close(row_sums.sum_by_place(rows, places, 7), expected)
