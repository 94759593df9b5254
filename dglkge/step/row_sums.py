"""Sums of the gradients of equal rows where they were computed, in the same order in every run.

On a GPU ``index_add_`` has no fixed order, and torch's form that has one takes 20 times as long as this and
more. Here the rows are walked in the order of their sums, each program :data:`LENGTH` of them: it adds every
run of equal places but its first one to their sum. That one may have begun before: its part is kept as a row
of its own. These rows, one for each program, are walked in the same way, until one program has all.
"""

from __future__ import annotations

import torch
from torch import Tensor

LENGTH = 64
"""Rows that a program walks."""

COLUMNS = 128
"""Columns of a program."""


def sum_by_place(rows: Tensor, places: Tensor, num_sums: int) -> Tensor:
    """Sum rows by place, in the same order in every run.

    Parameters
    ----------
    rows : (n, D) tensor
    places : (n,) int64 tensor
        The sum that each row is added to.
    num_sums : int

    Returns
    -------
    (num_sums, D) tensor

    Examples
    --------
    >>> sum_by_place(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 3).tolist()
    [[2.0], [5.0], [0.0]]
    """
    if rows.is_cuda:
        return sum_in_order(rows, places, num_sums)
    return rows.new_zeros(num_sums, rows.shape[1]).index_add_(0, places, rows)


def sum_in_order(rows: Tensor, places: Tensor, num_sums: int) -> Tensor:
    """Return :func:`sum_by_place` by the kernel."""
    # Here: Triton comes with torch for GPUs only.
    from dglkge.step.gpu_kernels import sum_runs

    width = rows.shape[1]
    sums = rows.new_zeros(num_sums, width)
    ordered, order = places.to(torch.int32).sort(stable=True)
    rows, is_first = rows.contiguous(), True
    while len(rows):
        num_programs = -(-len(rows) // LENGTH)
        parts = rows.new_empty(num_programs if num_programs > 1 else 0, width)
        grid = (num_programs, -(-width // COLUMNS))
        arrays = (rows, order, ordered, sums, parts, len(rows), width, len(parts))
        sum_runs[grid](*arrays, adds=not is_first, length=LENGTH, num_columns=COLUMNS)
        rows, ordered, is_first = parts, ordered[::LENGTH].contiguous(), False
        order = torch.arange(len(rows), device=rows.device)
    return sums
