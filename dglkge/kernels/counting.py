"""Compiled passes over a tile of scores: counts of scores greater than, or close to, a true answer's."""

from __future__ import annotations

from numpy import ndarray

from dglkge.kernels.jit import compiled

STRIP_COLUMNS = 128


@compiled
def count_scores(
    scores: ndarray, row_of: ndarray, low: ndarray, high: ndarray, num_greater: ndarray, num_close: ndarray
) -> None:
    """Count the scores above ``high`` and those in [low, high], for each true answer (K,)."""
    for k in range(len(row_of)):
        row = scores[row_of[k]]
        lowest, highest = low[k], high[k]
        greater, not_less = 0, 0
        # Two sums of comparisons and no branch: LLVM vectorises the loop.
        for column in range(len(row)):
            greater += row[column] > highest
            not_less += row[column] >= lowest
        num_greater[k] = greater
        num_close[k] = not_less - greater


@compiled
def list_close(
    scores: ndarray, row_of: ndarray, low: ndarray, high: ndarray, num_close: ndarray, columns: ndarray
) -> None:
    """Write the columns of the scores in [low, high], one true answer after another."""
    place = 0
    for k in range(len(row_of)):
        end = place + num_close[k]
        first = 0
        while place < end:
            # Most strips hold no close score; counting a strip is vectorised, listing its columns is not.
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
