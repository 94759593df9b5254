"""Softmax of the scores of negatives, and the logarithm of its denominator, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from dglkge.step.row_sums import jit

try:
    import triton
    import triton.language as tl
except ImportError:  # it comes with torch for GPUs
    triton = None

MOST_COLUMNS = 1 << 14
"""Scores of a query up to which a program of the kernel holds all of them."""


def share_scores(scores: Tensor) -> Tensor:
    """Turn scores of queries into each negative's share in the sum of their powers, in place.

    Parameters
    ----------
    scores : (Q, N) tensor
        On a device; replaced by e^s / sum of e^s over the row.

    Returns
    -------
    (Q,) float32 tensor
        Logarithm of each sum.
    """
    if scores.is_cuda and scores.shape[1] <= MOST_COLUMNS:
        return share_in_one_pass(scores)
    wide = scores.float()
    logs = wide.logsumexp(1)
    scores.copy_((wide - logs[:, None]).exp())
    return logs


def share_in_one_pass(scores: Tensor) -> Tensor:
    """Return :func:`share_scores` by the kernel."""
    num, width = scores.shape
    logs = torch.empty(num, device=scores.device)
    num_columns = triton.next_power_of_2(width)
    num_warps = min(16, max(4, num_columns // 512))
    share_row[(num,)](scores, logs, width, num_columns=num_columns, num_warps=num_warps)
    return logs


@jit
def share_row(scores, logs, width, num_columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Replace a row of scores by shares."""
    query = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, num_columns)
    is_column = columns < width
    found = tl.load(scores + query * width + columns, mask=is_column, other=float("-inf")).to(tl.float32)
    greatest = tl.max(found, 0)
    powers = tl.exp(found - greatest)
    total = tl.sum(powers, 0)
    tl.store(scores + query * width + columns, powers / total, mask=is_column)
    tl.store(logs + query, greatest + tl.log(total))
