"""All known answers to a query, for filtered ranking and for marking predictions that are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dglkge.typing import Side


class KnownTriples:
    """An index of triples by (head, relation) and by (relation, tail).

    Parameters
    ----------
    triples : sequence of (n, 3) int64
        Head, relation and tail as original ids; usually the train, valid and test split. Duplicates count
        once.
    num_relations : int
        Number of relations of the dataset.

    Notes
    -----
    Entity ids are counted per type. The relation fixes the types, so (entity, relation) is unambiguous.
    """

    def __init__(self, triples: Sequence[np.ndarray], num_relations: int) -> None:
        self._triples = triples
        self._num_relations = num_relations
        self._index: dict[Side, tuple[np.ndarray, np.ndarray]] = {}

    def answers(
        self, side: Side, entity_ids: np.ndarray, relation_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return every known answer to each query.

        Parameters
        ----------
        side : Side
            The wanted side: with ``Side.TAIL`` the entities are heads and the answers are tails.
        entity_ids : (Q,) int64
            The entity given in each query.
        relation_ids : (Q,) int64
            The relation of each query.

        Returns
        -------
        query_index : (M,) int64
            Which query an answer belongs to, ascending.
        answer_ids : (M,) int64
            The answers, ascending within a query.
        """
        first, count, answers = self.runs(side, entity_ids, relation_ids)
        query_index = np.repeat(np.arange(len(first), dtype=np.int64), count)
        # Place within the range of a query's answers, plus the start of that range.
        place = np.arange(len(query_index)) - np.repeat(np.cumsum(count) - count, count)
        return query_index, answers[place + np.repeat(first, count)]

    def runs(
        self, side: Side, entity_ids: np.ndarray, relation_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return where the known answers to each query are, without copying them.

        Parameters are those of :meth:`answers`.

        Returns
        -------
        first, count : two (Q,) int64
        answer_ids : (n,) int64
            Of all queries; those of query i are ``answer_ids[first[i] : first[i] + count[i]]``,
            ascending.
        """
        keys, answers = self._sorted(side)
        # Two binary searches give each query's range of answers; all queries are looked up at once.
        wanted = self._keys(np.asarray(entity_ids), np.asarray(relation_ids))
        first = np.searchsorted(keys, wanted, side="left")
        return first, np.searchsorted(keys, wanted, side="right") - first, answers

    def _keys(self, entity_ids: np.ndarray, relation_ids: np.ndarray) -> np.ndarray:
        # One int64 for the pair, so that numpy sorts and searches numbers. It needs entities times relations
        # < 2**63.
        return entity_ids.astype(np.int64) * self._num_relations + relation_ids

    def _sorted(self, side: Side) -> tuple[np.ndarray, np.ndarray]:
        """Return keys (n,) ascending and their answers (n,); built at the first query of that side."""
        if side not in self._index:
            # The empty array allows for no triples at all: concatenate refuses an empty list.
            columns = [np.zeros((0, 3), dtype=np.int64), *self._triples]
            keys = np.concatenate([self._keys(t[:, side.anchor_column], t[:, 1]) for t in columns])
            answers = np.concatenate([t[:, side.column] for t in columns])
            # Sorted arrays and binary search: a dict of sets would need Python objects for every triple.
            order = np.lexsort((answers, keys))
            keys, answers = keys[order], answers[order]
            new = np.ones(len(keys), dtype=bool)
            new[1:] = (keys[1:] != keys[:-1]) | (answers[1:] != answers[:-1])
            self._index[side] = (keys[new], answers[new])
        return self._index[side]
