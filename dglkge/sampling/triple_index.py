"""Which of the triples of a global batch a partition owns, and where they stand in its edge table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dglkge.kernels.order import find_rows

Ids = npt.NDArray[np.int64]

IDS_A_BUCKET = 32
"""At most about so many of the partition's triples share a bucket, and at least half as many: the index takes
a quarter to a half of a byte for each."""


class TripleIndex:
    """Finds triples among those of a partition.

    On several machines every trainer looks all triples of a global batch up, those of the others too; a
    binary search over the whole partition would take longer than to read the edges that it finds. So
    triple ids are cut into buckets of equal width, and only a bucket is searched.

    Parameters
    ----------
    triple_ids : (m,) int64
        The partition's, ascending.

    Examples
    --------
    >>> index = TripleIndex(np.array([2, 3, 7]))
    >>> index.find(np.array([7, 5, 2, 9]))
    (array([0, 2]), array([2, 0]))
    """

    def __init__(self, triple_ids: Ids) -> None:
        self._triple_ids = triple_ids
        num_ids = int(triple_ids[-1]) + 1 if len(triple_ids) else 0
        width = IDS_A_BUCKET * num_ids // max(1, len(triple_ids))
        self._shift = max(0, width.bit_length() - 1)
        bounds = np.arange(0, (num_ids >> self._shift) + 2, dtype=np.int64) << self._shift
        self._starts = np.searchsorted(triple_ids, bounds)

    def find(self, triple_ids: Ids) -> tuple[Ids, Ids]:
        """Find the triples that the partition owns.

        Returns
        -------
        (places, rows) : two (n,) int64
            Places in ``triple_ids``, ascending, and rows in the partition's edge table.
        """
        rows = np.empty(len(triple_ids), np.int64)
        find_rows(triple_ids, self._triple_ids, self._starts, self._shift, rows)
        places = np.flatnonzero(rows >= 0)
        return places, rows[places]
