"""One pass over a tile of float32 scores: what is greater for certain, and what is too close to tell."""

from __future__ import annotations

import numpy as np
import torch

from dglkge.kernels.counting import count_scores, list_close


def count_greater(
    scores: torch.Tensor, row_of: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compare each row of scores with the limits of the true answers that belong to it.

    Parameters
    ----------
    scores : (b, n) float32 tensor
    row_of : (K,) int64 tensor
        The row of scores that each true answer is ranked in.
    low, high : (K,) float32 tensor
        Below ``low`` a score is less than the true one for certain, above ``high`` greater.

    Returns
    -------
    num_greater : (K,) int64 tensor
        Scores above ``high``.
    close, column : (m,) int64 tensor
        The scores in [low, high]: which true answer, and which column.
    """
    if scores.device.type != "cpu":
        return _count_greater_torch(scores, row_of, low, high)
    arrays = (scores.contiguous().numpy(), row_of.numpy(), low.numpy(), high.numpy())
    num_greater, num_close = np.empty((2, len(row_of)), np.int64)
    count_scores(*arrays, num_greater, num_close)
    close = np.repeat(np.arange(len(row_of)), num_close)
    column = np.empty(len(close), np.int64)
    list_close(*arrays, num_close, column)
    return torch.from_numpy(num_greater), torch.from_numpy(close), torch.from_numpy(column)


def _count_greater_torch(
    scores: torch.Tensor, row_of: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same with torch's operations, for accelerators."""
    of_answers = scores[row_of]
    greater = of_answers > high.unsqueeze(1)
    close, column = ((of_answers >= low.unsqueeze(1)) & ~greater).nonzero(as_tuple=True)
    return greater.sum(1), close, column
