"""Kernels for a GPU, which Triton compiles: see :mod:`.reductions`."""

from __future__ import annotations

import triton
import triton.language as tl

LENGTH = tl.constexpr(64)
"""Rows that a program of :func:`sum_runs` walks."""

COLUMNS = tl.constexpr(128)
"""Columns of such a program."""


@triton.jit
def sum_runs(  # type: ignore[no-untyped-def]  # noqa: ANN201
    rows, order, places, sums, parts, num_rows, width, adds: tl.constexpr  # noqa: ANN001
):  # fmt: skip
    """Walk some rows, see :mod:`.reductions`; ``adds``: to the sums that there are, else they are written.

    Compiled by Triton, which takes no other annotations.
    """
    program = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    start = program * LENGTH
    place = tl.load(places + start).to(tl.int64)
    is_part = program * 0 + tl.num_programs(0) > 1  # a tensor, as all masks are
    total = tl.zeros((COLUMNS,), tl.float32)
    for step in range(LENGTH):
        position = start + step
        is_row = position < num_rows
        here = tl.load(places + position, mask=is_row, other=0).to(tl.int64)
        ends = is_row & (here != place)
        is_sum = is_column & ends & (is_part == 0)
        target = sums + place * width + columns
        if adds:
            total += tl.load(target, mask=is_sum, other=0.0)
        tl.store(target, total, mask=is_sum)
        tl.store(parts + program * width + columns, total, mask=is_column & ends & is_part)
        total = tl.where(ends, 0.0, total)
        is_part = is_part & (ends == 0)
        place = tl.where(ends, here, place)
        row = tl.load(order + position, mask=is_row, other=0)
        total += tl.load(rows + row * width + columns, mask=is_column & is_row, other=0.0)
    is_sum = is_column & (is_part == 0)
    target = sums + place * width + columns
    if adds:
        total += tl.load(target, mask=is_sum, other=0.0)
    tl.store(target, total, mask=is_sum)
    tl.store(parts + program * width + columns, total, mask=is_column & is_part)


@triton.jit
def share_row(scores, logs, width, num_columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Replace a row of scores by shares."""
    query = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, num_columns)
    is_column = columns < width
    values = tl.load(scores + query * width + columns, mask=is_column, other=float("-inf")).to(tl.float32)
    greatest = tl.max(values, 0)
    powers = tl.exp(values - greatest)
    total = tl.sum(powers, 0)
    tl.store(scores + query * width + columns, powers / total, mask=is_column)
    tl.store(logs + query, greatest + tl.log(total))
