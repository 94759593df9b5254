"""Scores in mixed buckets: why answers in the range of the query's own entity are lowered.

A mixed bucket {i, j} has all triples between its two ranges, and of those inside one a (P - 1)th, so that an
epoch has each once. A query's true answers in the range of its own entity are therefore P - 1 times as rare
there, beside those in the other range, as they are in the graph, while negatives come from both alike. A
model that fits such batches ranks them too low, by log(P - 1) in log-odds.

So the loss gets s - log(P - 1) in place of the score s of an answer, true or not, in the range of the
query's own entity: the known difference of the frequencies is in the batch's scores, and not in the model.
This is the logit adjustment of Menon et al. 2021 (Long-tail learning via logit adjustment, eq. 10) with the
frequencies of the two kinds of answers. It needs a loss that takes scores for log-odds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dglkge.data.range_walk import ranges_of


def range_offset(num_ranges: int) -> float:
    """Return what the scores of answers in the range of the query's own entity are lowered by.

    Examples
    --------
    >>> range_offset(2), round(range_offset(4), 3)
    (0.0, 1.099)
    """
    return math.log(num_ranges - 1)


class NodeRanges:
    """Returns the ranges of nodes.

    Parameters
    ----------
    bounds : mapping of str to (num_parts * P + 1,) int64
        Of each entity type; see :func:`dglkge.data.range_walk.range_bounds`.
    num_ranges : int
    """

    def __init__(self, bounds: Mapping[str, npt.NDArray[np.int64]], num_ranges: int) -> None:
        self._bounds = bounds
        self._num_ranges = num_ranges

    def __call__(self, entity_type: str, node_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the range (n,) of each node on its own machine."""
        return ranges_of(node_ids, self._bounds[entity_type], self._num_ranges)
