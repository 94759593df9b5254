"""Queries with all their answers, and batches of queries, for ``training.objective: k_vs_all``.

A query is a distinct (head, relation, ?) or (?, relation, tail) of the training triples. Queries are numbered
by side, relation and entity, all by original ids, so that neither the numbers nor their order in an epoch
depend on how the graph was partitioned. An epoch is one pass over the queries; global batch s is the window
[s·G, (s+1)·G) of their keyed permutation, as of triples in :mod:`.triple_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dglkge.data.known_triples import KnownTriples
from dglkge.data.partition_layout import PartitionLayout
from dglkge.sampling import triple_order
from dglkge.sampling.edge_batches import EdgeBatch, EdgeBatches, EpochBatches, ignore_phase, trainer_share
from dglkge.typing import RELATION, Ids, Mask, Side


class AnswerIndex:
    """Queries and their answers.

    Attributes
    ----------
    starts : (Q + 1,) int64
        First answer of each query, and the end of the last one's.
    """

    starts: Ids

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def num_answers(self) -> Ids:
        """Number of answers of each query, (Q,)."""
        return np.diff(self.starts)

    def blocks(self) -> Iterator[tuple[int, int, Ids]]:
        """Yield blocks of queries as first query, end, and their answers (A,), ascending for each query."""
        raise NotImplementedError


class PairIndex(AnswerIndex):
    """All pairs of entities of training triples (T, 3), at their times, and their relations, by original ids.

    Distinct relations of pair i, ascending, are ``answers[starts[i]:starts[i + 1]]``, whatever its time; its
    entity types are ``kinds[kind_of[i]]``. ``types`` are those of heads and tails of each relation.

    Examples
    --------
    >>> index = PairIndex(np.array([[0, 1, 5], [0, 0, 5], [5, 0, 0]]), [("a", "a"), ("a", "a")])
    >>> index.heads.tolist(), index.tails.tolist(), index.answers.tolist(), index.starts.tolist()
    ([0, 5], [5, 0], [0, 1, 0], [0, 2, 3])
    """

    def __init__(
        self, triples: npt.NDArray[np.integer], types: Sequence[tuple[str, str]], num_times: int = 1
    ) -> None:
        heads, relations, tails = (np.asarray(column, np.int64) for column in triples.T)
        self.kinds = sorted(set(types))
        number = {kind: i for i, kind in enumerate(self.kinds)}
        kinds = np.array([number[pair] for pair in types], np.int64)[relations]
        relations, times = np.divmod(relations, num_times)
        order = np.lexsort((relations, times, tails, heads, kinds))
        columns = [column[order] for column in (kinds, heads, tails, times, relations)]
        # The same triple may occur twice in the data; its relation counts once.
        is_pair = _changes(columns[:4])
        is_answer = is_pair | _changes(columns[4:])
        self.kind_of, self.heads, self.tails, self.times = (column[is_pair] for column in columns[:4])
        self.answers: Ids = columns[4][is_answer]
        self.starts = np.append(np.flatnonzero(is_pair[is_answer]), len(self.answers)).astype(np.int64)

    def blocks(self) -> Iterator[tuple[int, int, Ids]]:
        yield 0, len(self), self.answers


def _changes(columns: Sequence[Ids]) -> Mask:
    """Return a mask of the rows that differ from the row before in one of the columns."""
    differs = np.ones(len(columns[0]), bool)
    if len(differs):
        differs[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return differs


@dataclass(frozen=True)
class PairRun:
    """A run of a batch's pairs of the same entity types: ``pair_heads[start:end]`` and so on."""

    lhs: str
    rhs: str
    start: int
    end: int


BLOCK_ANSWERS = 1 << 20
"""Answers that are read at a time; the answers to one query may be more."""


def _no_ids() -> Ids:
    return np.empty(0, np.int64)


class QueryIndex(AnswerIndex):
    """All queries of the training triples, one split, by original ids. Answers are read where they are.

    Attributes
    ----------
    sides : (Q,) int64
        0: the tail is missing, 1: the head.
    relations, anchors : (Q,) int64
        Relation and given entity of each query.

    Examples
    --------
    >>> index = QueryIndex(KnownTriples([np.array([[0, 0, 1], [0, 0, 2], [0, 0, 2]])], num_relations=1))
    >>> list(zip(index.sides.tolist(), index.anchors.tolist(), np.diff(index.starts).tolist()))
    [(0, 0, 2), (1, 1, 1), (1, 2, 1)]
    """

    def __init__(self, known: KnownTriples) -> None:
        sides, relations, anchors, starts = [], [], [], []
        self._answers: list[npt.NDArray[np.integer]] = []
        offset = 0
        for number, side in enumerate((Side.TAIL, Side.HEAD)):
            (direction,) = known.directions(side)
            first, entities = direction.queries()
            anchors.append(entities)
            relations.append(np.searchsorted(direction.starts, first, side="right") - 1)
            sides.append(np.full(len(first), number, np.int64))
            starts.append(first + offset)
            self._answers.append(direction.answers)
            offset += len(direction.answers)
        self.sides: Ids = np.concatenate(sides)
        self.relations: Ids = np.concatenate(relations)
        self.anchors: Ids = np.concatenate(anchors)
        self.starts = np.append(np.concatenate(starts), offset)

    def blocks(self) -> Iterator[tuple[int, int, Ids]]:
        offset = 0
        for answers in self._answers:
            first, stop = np.searchsorted(self.starts[:-1], [offset, offset + len(answers)]).tolist()
            while first < stop:
                # At least one query; more while their answers are few enough.
                end = int(np.searchsorted(self.starts, self.starts[first] + BLOCK_ANSWERS, side="right")) - 1
                end = min(max(end, first + 1), stop)
                run = slice(*(self.starts[[first, end]] - offset))
                yield first, end, answers[run].astype(np.int64)
                first = end
            offset += len(answers)


@dataclass(frozen=True)
class QueryRun:
    """A run of a batch's queries for a missing side and a pair of entity types: ``anchors[start:end]``."""

    side: Side
    anchor_type: str
    answer_type: str
    start: int
    end: int


@dataclass(frozen=True)
class QueryBatch:
    """One trainer's share of a global batch of queries.

    Attributes
    ----------
    index : int
        Number of the global batch in the epoch.
    global_size : int
        Number of queries in the global batch, over all trainers.
    query_ids : (B,) int64
    anchors, relations : (B,) int64
        Node ids.
    pair_ids, pair_heads, pair_tails, pair_times : (P,) int64
        Numbers of the queries (h, ?, t), node ids of their entities, and times; the global size counts them
        too.
    """

    epoch: int
    index: int
    global_size: int
    query_ids: Ids
    anchors: Ids
    relations: Ids
    runs: tuple[QueryRun, ...]
    pair_ids: Ids = field(default_factory=_no_ids)
    pair_heads: Ids = field(default_factory=_no_ids)
    pair_tails: Ids = field(default_factory=_no_ids)
    pair_times: Ids = field(default_factory=_no_ids)
    pair_runs: tuple[PairRun, ...] = ()

    def __len__(self) -> int:
        return len(self.query_ids) + len(self.pair_ids)


@dataclass
class QueryBatches(EpochBatches):
    """Selects this trainer's queries of each global batch: those with a given entity on its machine.

    Attributes
    ----------
    types : sequence of (str, str)
        Entity types of the heads and tails of each relation, by original id.
    batch_size : int
        Queries of a global batch.
    place_of_trainer : (int, int, int)
        Machine of this trainer, its rank there, and the trainers of a machine.
    pairs : PairIndex, optional
        Queries (h, ?, t), which an epoch passes over as well, in the same order.
    """

    index: QueryIndex
    layout: PartitionLayout
    types: Sequence[tuple[str, str]]
    batch_size: int
    place_of_trainer: tuple[int, int, int]
    seed: int
    pairs: PairIndex | None = None

    def __post_init__(self) -> None:
        index, pairs, layout, types = self.index, self.pairs, self.layout, self.types
        self._num_queries = len(index) + (0 if pairs is None else len(pairs))
        machine, *self._turn = self.place_of_trainer
        self._relations = np.asarray(layout.edge_ids(RELATION))[index.relations]
        # A kind is a side and a pair of types; queries of one kind are looked up and scored together.
        kinds = sorted({(side, *pair) for pair in types for side in (0, 1)})
        number = {kind: i for i, kind in enumerate(kinds)}
        kind_of = np.array([[number[(side, *pair)] for pair in types] for side in (0, 1)], np.int64)
        # The missing side and the types of the given entity and of the answers.
        self._kinds = [
            (Side.TAIL, lhs, rhs) if side == 0 else (Side.HEAD, rhs, lhs) for side, lhs, rhs in kinds
        ]
        self._kind = kind_of[index.sides, index.relations]
        self._anchors = np.empty(len(index), np.int64)
        # A query belongs to the machine of its given entity: that row is read from shared memory.
        self._is_here = np.zeros(len(index), bool)
        for i, (_, anchor_type, _) in enumerate(self._kinds):
            ids = np.flatnonzero(self._kind == i)
            self._anchors[ids] = nodes = np.asarray(layout.node_ids(anchor_type))[index.anchors[ids]]
            self._is_here[ids] = _is_on(layout, machine, anchor_type, nodes)
        if pairs is not None:
            self._place_pairs(pairs, layout, machine)

    def _place_pairs(self, pairs: PairIndex, layout: PartitionLayout, machine: int) -> None:
        """Find the node ids of all pairs, and which of them have their head on this machine."""
        self._pair_nodes = np.empty((2, len(pairs)), np.int64)
        is_here = np.zeros(len(pairs), bool)
        for i, types in enumerate(pairs.kinds):
            pair_numbers = np.flatnonzero(pairs.kind_of == i)
            for side, (name, ids) in enumerate(zip(types, (pairs.heads, pairs.tails))):
                self._pair_nodes[side, pair_numbers] = np.asarray(layout.node_ids(name))[ids[pair_numbers]]
            is_here[pair_numbers] = _is_on(layout, machine, types[0], self._pair_nodes[0, pair_numbers])
        self._is_here = np.concatenate([self._is_here, is_here])

    def asks_for(self, entity_type: str) -> Mask:
        """Return a mask (Q,) of the queries with answers of an entity type."""
        asks = np.array([answer_type == entity_type for _, _, answer_type in self._kinds], bool)
        return asks[self._kind]

    def __len__(self) -> int:
        return triple_order.num_batches(self._num_queries, self.batch_size)

    def batch(self, epoch: int, index: int, enter: Callable[[str], None] = ignore_phase) -> QueryBatch:
        enter("order")
        positions = triple_order.window(index, self.batch_size, self._num_queries)
        ids = triple_order.inverse_permute(positions, self._num_queries, self.seed, epoch)
        enter("edges")
        # Selected by a lookup, as the whole index is on every trainer; no ids travel.
        ids = ids[self._is_here[ids]]
        ids = ids[trainer_share(len(ids), *self._turn)]
        # Numbers above those of the queries for entities are pairs.
        pairs = self._sorted_pairs(ids[ids >= len(self.index)] - len(self.index))
        ids = ids[ids < len(self.index)]
        ids = ids[np.argsort(self._kind[ids], kind="stable")]
        runs = tuple(QueryRun(*run) for run in _runs(self._kinds, self._kind[ids]))
        anchors, relations = self._anchors[ids], self._relations[ids]
        return QueryBatch(epoch, index, len(positions), ids, anchors, relations, runs, *pairs)

    def _sorted_pairs(self, ids: Ids) -> tuple[Ids, Ids, Ids, Ids, tuple[PairRun, ...]]:
        """Sort pairs by kind; returns their numbers, heads, tails, times and runs."""
        if self.pairs is None:
            return ids, ids, ids, ids, ()
        kind_of, kinds = self.pairs.kind_of, self.pairs.kinds
        ids = ids[np.argsort(kind_of[ids], kind="stable")]
        runs = tuple(PairRun(*run) for run in _runs(kinds, kind_of[ids]))
        return ids, self._pair_nodes[0, ids], self._pair_nodes[1, ids], self.pairs.times[ids], runs


def _is_on(layout: PartitionLayout, machine: int, entity_type: str, nodes: Ids) -> Mask:
    """Return whether a machine has each of some nodes."""
    first, end = layout.node_range(entity_type, machine)
    return (nodes >= first) & (nodes < end)


def _runs(kinds: Sequence[tuple[Any, ...]], ascending: Ids) -> Iterator[tuple[Any, ...]]:
    """Yield each kind that occurs among ascending numbers of kinds, with its run."""
    bounds = np.searchsorted(ascending, np.arange(len(kinds) + 1)).tolist()
    for kind, start, end in zip(kinds, bounds, bounds[1:]):
        if end > start:
            yield (*kind, start, end)


class ShardAnswers:
    """Answers of all queries among the rows of one shard, a run [first, stop) of node ids.

    Rows of the shard that answer query i are ``places[starts[i]:starts[i + 1]]``. ``is_asked`` (Q,) marks the
    queries with answers in the shard's table.
    """

    def __init__(self, index: AnswerIndex, is_asked: Mask, node_ids: Ids, first: int, stop: int) -> None:
        counts = np.zeros(len(index), np.int64)
        places = [_no_ids()]
        for start, end, answers in index.blocks():
            query_of = np.repeat(np.arange(end - start), np.diff(index.starts[start : end + 1]))
            kept = np.flatnonzero(is_asked[start:end][query_of])
            nodes = node_ids[answers[kept]]
            is_here = (nodes >= first) & (nodes < stop)
            counts[start:end] = np.bincount(query_of[kept[is_here]], minlength=end - start)
            places.append(nodes[is_here] - first)
        self.starts: Ids = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.places: Ids = np.concatenate(places)

    def of(self, query_ids: Ids) -> tuple[Ids, Ids]:
        """Return (starts, places) of some queries, in CSR form as above."""
        # Gathers ragged runs without a loop: each output place is its run's start plus its offset in the run.
        counts = self.starts[query_ids + 1] - self.starts[query_ids]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        offsets = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        return starts, self.places[np.repeat(self.starts[query_ids], counts) + offsets]


TrainingBatch = EdgeBatch | QueryBatch
TrainingBatches = EdgeBatches | QueryBatches
"""Batches of an epoch: of edges, or of queries."""
