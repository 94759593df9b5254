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
    """Sums of :data:`MEASURES` over the triples of a trainer.

    Examples
    --------
    >>> measures = BatchMeasures()
    >>> measures.add_penalty(0.5)
    >>> measures.add_violators(Side.TAIL, 3)
    >>> measures.take().tolist(), measures.take().tolist()
    ([0.5, 0.0, 3.0], [0.0, 0.0, 0.0])
    """

    def __init__(self) -> None:
        self._sums = np.zeros(len(MEASURES))

    def add_penalty(self, penalty: float) -> None:
        """Add the penalty of some triples."""
        self._sums[0] += penalty

    def add_violators(self, side: Side, count: int) -> None:
        """Add negatives of a side that score above the true answer."""
        self._sums[_VIOLATORS[side]] += count

    def take(self) -> npt.NDArray[np.float64]:
        """Return the sums since the last call, in the order of :data:`MEASURES`."""
        taken, self._sums = self._sums, np.zeros(len(MEASURES))
        return taken
