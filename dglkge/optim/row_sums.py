"""Sums of the gradients of equal rows where they were computed, in the same order in every run.

On a GPU ``index_add_`` has no fixed order, and torch's form that has one takes 20 times as long as this and
more. Here the rows are walked in the order of their sums, in two kernels:

1. Each program walks :data:`LENGTH` rows. It writes the sum of every run of equal places that begins in it,
   and what belongs to a run that began in a block before to a row of its own, the carry of the block.
2. Each program whose last run goes on in the next blocks adds their carries, in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # it comes with torch for GPUs
    triton = None

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
        The sum that each row is added to; each of ``num_sums`` has a row.
    num_sums : int

    Returns
    -------
    (num_sums, D) tensor

    Examples
    --------
    >>> sum_by_place(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 2).tolist()
    [[2.0], [5.0]]
    """
    if rows.is_cuda:
        return sum_in_order(rows, places, num_sums)
    return rows.new_zeros(num_sums, rows.shape[1]).index_add_(0, places, rows)


def sum_in_order(rows: Tensor, places: Tensor, num_sums: int) -> Tensor:
    """Return :func:`sum_by_place` by the kernels."""
    sums = rows.new_empty(num_sums, rows.shape[1])
    if len(rows):
        ordered, order = places.to(torch.int32).sort(stable=True)
        num_blocks = triton.cdiv(len(rows), LENGTH)
        carries = rows.new_empty(num_blocks, rows.shape[1])
        grid = (num_blocks, triton.cdiv(rows.shape[1], COLUMNS))
        arrays = (ordered, sums, carries, len(rows), rows.shape[1])
        _sum_runs[grid](rows.contiguous(), order, *arrays, LENGTH, COLUMNS)
        _add_carries[grid](*arrays, LENGTH, COLUMNS)
    return sums


def _jit(kernel: Any) -> Any:
    return kernel if triton is None else triton.jit(kernel)


@_jit
def _sum_runs(
    rows: Any,
    order: Any,
    places: Any,
    sums: Any,
    carries: Any,
    num_rows: Any,
    width: Any,
    LENGTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    start = block * LENGTH
    place = tl.load(places + start).to(tl.int64)
    is_carry = tl.load(places + start - 1, mask=start > 0, other=-1).to(tl.int64) == place
    total = tl.zeros((COLUMNS,), rows.dtype.element_ty)
    for step in range(LENGTH):
        position = start + step
        is_row = position < num_rows
        here = tl.load(places + position, mask=is_row, other=-1).to(tl.int64)
        here = tl.where(is_row, here, place)
        ends = here != place
        tl.store(sums + place * width + columns, total, mask=is_column & ends & (not is_carry))
        tl.store(carries + block * width + columns, total, mask=is_column & ends & is_carry)
        total = tl.where(ends, 0.0, total)
        is_carry = is_carry & (not ends)
        place = here
        row = tl.load(order + position, mask=is_row, other=0)
        total += tl.load(rows + row * width + columns, mask=is_column & is_row, other=0.0)
    tl.store(sums + place * width + columns, total, mask=is_column & (not is_carry))
    tl.store(carries + block * width + columns, total, mask=is_column & is_carry)


@_jit
def _add_carries(
    places: Any,
    sums: Any,
    carries: Any,
    num_rows: Any,
    width: Any,
    LENGTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    start = block * LENGTH
    last = tl.minimum(start + LENGTH, num_rows) - 1
    place = tl.load(places + last).to(tl.int64)
    # The run begins in this block, and goes on in the next one.
    began_before = tl.load(places + start - 1, mask=start > 0, other=-1).to(tl.int64) == place
    next_start = start + LENGTH
    goes_on = tl.load(places + next_start, mask=next_start < num_rows, other=-1).to(tl.int64) == place
    goes_on = goes_on & (not began_before)
    if goes_on:
        total = tl.load(sums + place * width + columns, mask=is_column, other=0.0)
        while goes_on:
            block += 1
            total += tl.load(carries + block * width + columns, mask=is_column, other=0.0)
            next_start = (block + 1) * LENGTH
            goes_on = tl.load(places + next_start, mask=next_start < num_rows, other=-1).to(tl.int64) == place
        tl.store(sums + place * width + columns, total, mask=is_column)
