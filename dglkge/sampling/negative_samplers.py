"""Whom the positives of a chunk are scored against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dglkge.kernels.hashing import below, combine

_NEGATIVES_KEY = 0x4E6  # tells the negatives' numbers from those of the order


class UniformNegatives:
    """Uniform entities of one type, the same for every trainer that holds a part of the chunk.

    They are keyed by (seed, epoch, batch, chunk, entity type) and drawn from original ids, so that a
    result depends neither on the number of trainers nor on how the graph was partitioned. Heads and
    tails of one type are scored against the same entities: half as many rows to gather and to update.

    Parameters
    ----------
    num_negatives : int
        Negatives of a chunk.
    node_ids : mapping of str to (n,) int64
        For each entity type the node id of every original id, in the order of the data set's types.
    seed : int
    """

    def __init__(self, num_negatives: int, node_ids: Mapping[str, npt.NDArray[np.int64]], seed: int) -> None:
        self._num_negatives = num_negatives
        self._node_ids = node_ids
        self._number_of_type = {name: number for number, name in enumerate(node_ids)}
        self._seed = seed

    @property
    def entity_types(self) -> Sequence[str]:
        """Entity types that it draws from."""
        return list(self._node_ids)

    def sample(self, entity_type: str, epoch: int, batch: int, chunk: int) -> npt.NDArray[np.int64]:
        """Return the node ids (N,) of a chunk's negatives of one entity type."""
        key = combine(_NEGATIVES_KEY, self._seed, epoch, batch, chunk, self._number_of_type[entity_type])
        table = self._node_ids[entity_type]
        return table[below(key, self._num_negatives, len(table))]


def find_equal(
    ids: npt.NDArray[np.int64], negative_ids: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Find the negatives that are the true answer itself, without looking at every pair.

    Parameters
    ----------
    ids : (B,) int64
    negative_ids : (N,) int64

    Returns
    -------
    (rows, columns) : two (M,) int64
        All places where ``ids[row] == negative_ids[column]``.
    """
    order = np.argsort(negative_ids)
    ordered = negative_ids[order]
    first = np.searchsorted(ordered, ids, side="left")
    counts = np.searchsorted(ordered, ids, side="right") - first
    rows = np.repeat(np.arange(len(ids)), counts)
    turn = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, order[first[rows] + turn]
