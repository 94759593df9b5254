"""Statistics of batches beside the loss: the regularizer's part of it, and negatives above true answers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dglkge.typing import Side

MEASURES = ("reg", "violators_lhs", "violators_rhs")
"""PyTorch-BigGraph's names. Means over triples: the regularizer's part of the loss, both sides summed; and
the number of negatives that score above the true head, and above the true tail."""

_VIOLATORS = {Side.HEAD: 1, Side.TAIL: 2}


class BatchMeasures:
    """Sums of :data:`MEASURES` over the triples of a trainer in one batch.

    Parameters
    ----------
    are_counted : bool

    Attributes
    ----------
    sums : (3,) float64 array
        (0,) where they are not counted.

    Examples
    --------
    >>> measures = BatchMeasures(True)
    >>> measures.add_penalty(0.5)
    >>> measures.add_violators(Side.TAIL, 3)
    >>> measures.sums.tolist()
    [0.5, 0.0, 3.0]
    """

    def __init__(self, are_counted: bool) -> None:
        self.are_counted = are_counted
        self.sums: npt.NDArray[np.float64] = np.zeros(len(MEASURES) if are_counted else 0)

    def add_penalty(self, penalty: float) -> None:
        """Add the penalty of some triples, where it is counted."""
        if self.are_counted:
            self.sums[0] += penalty

    def add_violators(self, side: Side, count: int) -> None:
        """Add negatives of a side that score above the true answer."""
        self.sums[_VIOLATORS[side]] += count
