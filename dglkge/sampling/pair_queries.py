"""Queries (h, ?, t) with all relations between two entities, for ``training.objective: k_vs_all``.

Pairs are numbered by entity types and original ids, so that the numbers do not depend on how the graph was
partitioned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class PairIndex:
    """All pairs of entities of the training triples and their relations, by original ids.

    Parameters
    ----------
    triples : (T, 3) integer array
        Head, relation and tail.
    types : sequence of (str, str)
        Entity types of the heads and tails of each relation.

    Attributes
    ----------
    kinds : list of (str, str)
        Entity types of heads and tails.
    kind_of : (P,) int64
        Kind of each pair.
    heads, tails : (P,) int64
    starts : (P + 1,) int64
    answers : (A,) int64
        Distinct relations of pair i, ascending: ``answers[starts[i]:starts[i + 1]]``.

    Examples
    --------
    >>> index = PairIndex(np.array([[0, 1, 5], [0, 0, 5], [5, 0, 0]]), [("a", "a"), ("a", "a")])
    >>> index.heads.tolist(), index.tails.tolist(), index.answers.tolist(), index.starts.tolist()
    ([0, 5], [5, 0], [0, 1, 0], [0, 2, 3])
    """

    def __init__(self, triples: npt.NDArray[np.integer], types: Sequence[tuple[str, str]]) -> None:
        heads, relations, tails = (np.asarray(column, np.int64) for column in triples.T)
        self.kinds = sorted(set(types))
        number = {kind: i for i, kind in enumerate(self.kinds)}
        kinds = np.array([number[pair] for pair in types], np.int64)[relations]
        order = np.lexsort((relations, tails, heads, kinds))
        columns = [column[order] for column in (kinds, heads, tails, relations)]
        # The same triple may occur twice in the data; its relation counts once.
        is_pair = _changes(columns[:3])
        is_answer = is_pair | _changes(columns[3:])
        self.kind_of, self.heads, self.tails = (column[is_pair] for column in columns[:3])
        self.answers: Ids = columns[3][is_answer]
        self.starts: Ids = np.append(np.flatnonzero(is_pair[is_answer]), len(self.answers)).astype(np.int64)

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def num_answers(self) -> Ids:
        """Number of relations of each pair, (P,)."""
        return np.diff(self.starts)

    def blocks(self) -> Iterator[tuple[int, int, Ids]]:
        """Yield all pairs as one block: first pair, end, and their relations (A,)."""
        yield 0, len(self), self.answers


def _changes(columns: Sequence[Ids]) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows that differ from the row before in one of the columns."""
    differs = np.ones(len(columns[0]), bool)
    if len(differs):
        differs[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return differs


@dataclass(frozen=True)
class PairRun:
    """A run of a batch's pairs of the same entity types.

    Attributes
    ----------
    lhs, rhs : str
    start, end : int
        The run: ``pair_heads[start:end]`` and so on.
    """

    lhs: str
    rhs: str
    start: int
    end: int
