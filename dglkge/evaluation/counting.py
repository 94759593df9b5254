"""One pass over a tile of float32 scores: what is greater for certain, and what is too close to tell."""

from __future__ import annotations

import numpy as np
import torch

from dglkge.kernels.jit import compiled

STRIP_COLUMNS = 128


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
    _count(*arrays, num_greater, num_close)
    close = np.repeat(np.arange(len(row_of)), num_close)
    column = np.empty(len(close), np.int64)
    _list_close(*arrays, num_close, column)
    return torch.from_numpy(num_greater), torch.from_numpy(close), torch.from_numpy(column)


def _count_greater_torch(
    scores: torch.Tensor, row_of: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same with torch's operations, for accelerators."""
    of_answers = scores[row_of]
    greater = of_answers > high.unsqueeze(1)
    close, column = ((of_answers >= low.unsqueeze(1)) & ~greater).nonzero(as_tuple=True)
    return greater.sum(1), close, column


@compiled
def _count(
    scores: np.ndarray,
    row_of: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    num_greater: np.ndarray,
    num_close: np.ndarray,
) -> None:
    for k in range(len(row_of)):
        row = scores[row_of[k]]
        lowest, highest = low[k], high[k]
        greater, not_less = 0, 0
        for column in range(len(row)):
            greater += row[column] > highest
            not_less += row[column] >= lowest
        num_greater[k] = greater
        num_close[k] = not_less - greater


@compiled
def _list_close(
    scores: np.ndarray,
    row_of: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    num_close: np.ndarray,
    columns: np.ndarray,
) -> None:
    place = 0
    for k in range(len(row_of)):
        end = place + num_close[k]
        first = 0
        while place < end:
            # Most strips hold no close score, and a strip is counted 16 columns at a time.
            strip = scores[row_of[k], first : first + STRIP_COLUMNS]
            num_in_strip = 0
            for column in range(len(strip)):
                num_in_strip += (strip[column] >= low[k]) & (strip[column] <= high[k])
            if num_in_strip > 0:
                for column in range(len(strip)):
                    if low[k] <= strip[column] <= high[k]:
                        columns[place] = first + column
                        place += 1
            first += STRIP_COLUMNS
