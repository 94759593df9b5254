"""All known answers to a query: for masking negatives, filtered ranking and marks of predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dglkge.data.known_index import Direction, Index, index_in_memory
from dglkge.typing import Side


class KnownTriples:
    """Known answers to (head, relation, ?) and (?, relation, tail).

    Of a data set's splits :meth:`dglkge.data.dataset.Dataset.known_triples` makes it: the triples are then in
    files that all processes of a machine map (see :mod:`dglkge.data.known_index`).

    Parameters
    ----------
    triples : sequence of (n, 3) int64
        Head, relation and tail as original ids, to be indexed in memory. Duplicates count once.
    num_relations : int
        Number of relations of the dataset.
    splits : sequence of callable
        Each opens the index of more triples; called at the first query.

    Notes
    -----
    Entity ids are counted per type. The relation fixes the types, so (entity, relation) is unambiguous.
    """

    def __init__(
        self, triples: Sequence[np.ndarray], num_relations: int, splits: Sequence[Callable[[], Index]] = ()
    ) -> None:
        self._triples = triples
        self._num_relations = num_relations
        self._splits = splits
        self._opened: list[Index] | None = None
        self._directions: dict[Side, list[Direction]] = {}

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
        found = [_gather(one, entity_ids, relation_ids) for one in self.directions(side)]
        found = [(queries, answers) for queries, answers in found if len(queries)] or found[:1]
        if len(found) == 1:
            return found[0]
        queries, answers = (np.concatenate(columns) for columns in zip(*found))
        base = int(answers.max()) + 1
        if base * max(len(entity_ids), 1) >= 2**63:
            order = np.lexsort((answers, queries))
            queries, answers = queries[order], answers[order]
        else:
            # Few runs that ascend: the stable sort merges them, without sorting them again.
            queries, answers = np.divmod(np.sort(queries * base + answers, kind="stable"), base)
        # A triple may stand in several splits.
        is_new = np.ones(len(queries), bool)
        is_new[1:] = (queries[1:] != queries[:-1]) | (answers[1:] != answers[:-1])
        return queries[is_new], answers[is_new]

    def runs(
        self, side: Side, entity_ids: np.ndarray, relation_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return where the known answers to each query are; of one split, without copying them.

        Parameters are those of :meth:`answers`.

        Returns
        -------
        first, count : two (Q,) int64
        answer_ids : (n,) int64 or uint32
            Those of query i are ``answer_ids[first[i] : first[i] + count[i]]``, ascending.
        """
        directions = self.directions(side)
        if len(directions) == 1:
            first, count = directions[0].runs(entity_ids, relation_ids)
            return first, count, directions[0].answers
        queries, answers = self.answers(side, entity_ids, relation_ids)
        count = np.bincount(queries, minlength=len(entity_ids))
        return np.cumsum(count) - count, count, answers

    def contain(
        self, side: Side, entity_ids: np.ndarray, relation_ids: np.ndarray, answer_ids: np.ndarray
    ) -> np.ndarray:
        """Return whether each answer (Q,) is a known one of its query (Q,): bool."""
        of_each = [one.contain(entity_ids, relation_ids, answer_ids) for one in self.directions(side)]
        found: np.ndarray = np.any(of_each, axis=0)
        return found

    def directions(self, side: Side) -> list[Direction]:
        """Return the sorted triples of each split, for one wanted side; opened or built at the first call."""
        if side not in self._directions:
            if self._opened is None:
                self._opened = [open_index() for open_index in self._splits]
            found = [index[side] for index in self._opened]
            if self._triples or not found:
                # In memory: only the side that is asked for.
                found.append(index_in_memory(self._triples, self._num_relations, [side])[side])
            self._directions[side] = found
        return self._directions[side]


def _gather(
    direction: Direction, entity_ids: np.ndarray, relation_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the query (M,) and the id (M,) of every answer, as int64."""
    first, count = direction.runs(entity_ids, relation_ids)
    query_index = np.repeat(np.arange(len(first), dtype=np.int64), count)
    # Place within the range of a query's answers, plus the start of that range.
    place = np.arange(len(query_index)) - np.repeat(np.cumsum(count) - count, count)
    return query_index, direction.answers[place + np.repeat(first, count)].astype(np.int64)
