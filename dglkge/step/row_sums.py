"""Sums of the gradients of equal rows where they were computed, in the same order in every run.

On a GPU ``index_add_`` has no fixed order, and torch's form that has one takes 20 times as long as this and
more. Here the rows are walked in the order of their sums, each program :data:`LENGTH` of them: it adds every
run of equal places but its first one to their sum. That one may have begun before: its part is kept as a row
of its own. These rows, one for each program, are walked in the same way, until one program has all.
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
    width = rows.shape[1]
    sums = rows.new_zeros(num_sums, width)
    ordered, order = places.to(torch.int32).sort(stable=True)
    rows, is_first = rows.contiguous(), True
    while len(rows):
        num_programs = triton.cdiv(len(rows), LENGTH)
        parts = rows.new_empty(num_programs if num_programs > 1 else 0, width)
        grid = (num_programs, triton.cdiv(width, COLUMNS))
        arrays = (rows, order, ordered, sums, parts, len(rows), width, len(parts))
        sum_runs[grid](*arrays, adds=not is_first, length=LENGTH, num_columns=COLUMNS)
        rows, ordered, is_first = parts, ordered[::LENGTH].contiguous(), False
        order = torch.arange(len(rows), device=rows.device)
    return sums


def jit(kernel: Any) -> Any:
    """Return a kernel for a GPU, compiled where it is called first; itself where there is no Triton."""
    return kernel if triton is None else triton.jit(kernel)


@jit
def sum_runs(  # type: ignore[no-untyped-def]  # noqa: ANN201
    rows, order, places, sums, parts, num_rows, width, num_parts,  # noqa: ANN001
    adds: tl.constexpr, length: tl.constexpr, num_columns: tl.constexpr,
):  # fmt: skip
    """Walk some rows, see above; ``adds``: to the sums that there are, else those of 0 are written.

    Compiled by Triton, which takes no other annotations.
    """
    program = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * num_columns + tl.arange(0, num_columns)
    is_column = columns < width
    start = program * length
    place = tl.load(places + start).to(tl.int64)
    is_part = num_parts > 0
    total = tl.zeros((num_columns,), tl.float32)
    for step in range(length):
        position = start + step
        is_row = position < num_rows
        here = tl.load(places + position, mask=is_row, other=0).to(tl.int64)
        ends = is_row & (here != place)
        is_sum = is_column & ends & (not is_part)
        target = sums + place * width + columns
        if adds:
            total += tl.load(target, mask=is_sum, other=0.0)
        tl.store(target, total, mask=is_sum)
        tl.store(parts + program * width + columns, total, mask=is_column & ends & is_part)
        total = tl.where(ends, 0.0, total)
        is_part = is_part & (not ends)
        place = tl.where(ends, here, place)
        row = tl.load(order + position, mask=is_row, other=0)
        total += tl.load(rows + row * width + columns, mask=is_column & is_row, other=0.0)
    is_sum = is_column & (not is_part)
    target = sums + place * width + columns
    if adds:
        total += tl.load(target, mask=is_sum, other=0.0)
    tl.store(target, total, mask=is_sum)
    tl.store(parts + program * width + columns, total, mask=is_column & is_part)
