"""Sums of the gradients of equal rows, and softmax of scores, by kernels of a GPU or by torch.

On a GPU ``index_add_`` has no fixed order, and torch's form that has one takes 20 times as long as the kernel
and more. Here the rows are walked in the order of their sums, each program some of them: it adds every
run of equal places but its first one to their sum. That one may have begun before: its part is kept as a row
of its own. These rows, one for each program, are walked in the same way, until one program has all.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_COLUMNS = 1 << 14
"""Scores of a query up to which a program of the kernel holds all of them."""


def sum_by_place(rows: Tensor, places: Tensor, num_sums: int) -> Tensor:
    """Sum rows (n, D) by place (n,) int64 to (num_sums, D), in the same order in every run.

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
    from dglkge.step.gpu_kernels import COLUMNS, LENGTH, sum_runs

    length, width = LENGTH.value, rows.shape[1]
    sums = rows.new_zeros(num_sums, width)
    ordered, order = places.to(torch.int32).sort(stable=True)
    rows, is_first = rows.contiguous(), True
    while len(rows):
        num_programs = -(-len(rows) // length)
        parts = rows.new_empty(num_programs if num_programs > 1 else 0, width)
        grid = (num_programs, -(-width // COLUMNS.value))
        sum_runs[grid](rows, order, ordered, sums, parts, len(rows), width, adds=not is_first)
        rows, ordered, is_first = parts, ordered[::length].contiguous(), False
        order = torch.arange(len(rows), device=rows.device)
    return sums


def share_scores(scores: Tensor) -> Tensor:
    """Replace scores (Q, N) by e^s / sum of e^s over the row; returns the logarithms (Q,) float32 of the
    sums.
    """
    if scores.is_cuda and scores.shape[1] <= MOST_COLUMNS:
        return share_in_one_pass(scores)
    wide = scores.float()
    logs = wide.logsumexp(1)
    scores.copy_((wide - logs[:, None]).exp())
    return logs


def share_in_one_pass(scores: Tensor) -> Tensor:
    """Return :func:`share_scores` by the kernel."""
    # Here: Triton comes with torch for GPUs only.
    from dglkge.step.gpu_kernels import share_row

    num, width = scores.shape
    logs = torch.empty(num, device=scores.device)
    num_columns = 1 << (width - 1).bit_length()
    num_warps = min(16, max(4, num_columns // 512))
    share_row[(num,)](scores, logs, width, num_columns=num_columns, num_warps=num_warps)
    return logs
