"""Softmax of the scores of negatives, and the logarithm of its denominator, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

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
    # Here: Triton comes with torch for GPUs only.
    from dglkge.step.gpu_kernels import share_row

    num, width = scores.shape
    logs = torch.empty(num, device=scores.device)
    num_columns = 1 << (width - 1).bit_length()
    num_warps = min(16, max(4, num_columns // 512))
    share_row[(num,)](scores, logs, width, num_columns=num_columns, num_warps=num_warps)
    return logs
