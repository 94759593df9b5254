"""Queries with all their answers, and batches of queries, for ``training.objective: k_vs_all``.

A query is a distinct (head, relation, ?) or (?, relation, tail) of the training triples. Queries are numbered
by side, relation and entity, all by original ids, so that neither the numbers nor their order in an epoch
depend on how the graph was partitioned. An epoch is one pass over the queries; global batch s is the window
[s·G, (s+1)·G) of their keyed permutation, as of triples in :mod:`.triple_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dglkge.data.known_triples import KnownTriples
from dglkge.data.partition_layout import PartitionLayout
from dglkge.data.sorted_arrays import is_first, spans
from dglkge.sampling import triple_order
from dglkge.sampling.edge_batches import EdgeBatch, EdgeBatches, EpochBatches, ignore_phase, trainer_share
from dglkge.typing import RELATION, Floats, Ids, Mask, Side


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

    def num_answers(self, query_ids: Ids) -> Ids:
        """Return the number of answers of each query, (n,)."""
        return self.starts[query_ids + 1] - self.starts[query_ids]

    def blocks(self) -> Iterator[tuple[int, int, npt.NDArray[np.integer]]]:
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
        self.kinds = sorted(set(types))
        number = {kind: i for i, kind in enumerate(self.kinds)}
        kind_of = np.array([number[pair] for pair in types], np.int64)
        heads, tails = triples[:, 0], triples[:, 2]
        relations, times = np.divmod(triples[:, 1].astype(np.int64), num_times)
        parts = (kind_of[triples[:, 1]], heads, tails, times, relations)
        # Each of these numbers is below 2**31: half as wide as ids, as every trainer keeps them.
        columns = [part.astype(np.int32) for part in parts]
        del relations, times, parts
        order = np.lexsort((columns[4], columns[3], columns[2], columns[1], columns[0]))
        columns = [column[order] for column in columns]
        # The same triple may occur twice in the data; its relation counts once.
        is_pair = is_first(*columns[:4])
        is_answer = is_pair | is_first(columns[4])
        self.kind_of, self.heads, self.tails, self.times = (column[is_pair] for column in columns[:4])
        self.answers = columns[4][is_answer]
        self.starts = np.append(np.flatnonzero(is_pair[is_answer]), len(self.answers)).astype(np.int64)

    def blocks(self) -> Iterator[tuple[int, int, npt.NDArray[np.integer]]]:
        yield 0, len(self), self.answers


class PairRun(NamedTuple):
    """Queries (n,) of a batch for the relation of pairs of the same entity types.

    Attributes
    ----------
    ids : (n,) int64
        Numbers in the :class:`PairIndex`.
    heads, tails : (n,) int64
        Node ids.
    times : (n,) int64
    weights : (n,) float32 or None
    """

    lhs: str
    rhs: str
    ids: Ids
    heads: Ids
    tails: Ids
    times: Ids
    weights: Floats | None


BLOCK_ANSWERS = 1 << 20
"""Answers that are read at a time; the answers to one query may be more."""


class QueryIndex(AnswerIndex):
    """All queries of the training triples, one split, by original ids.

    They are numbered by side (first those whose tail is missing), relation and given entity. What they ask
    and their answers are read where they lie, in the index of known triples: ``starts`` is all that a trainer
    keeps of them.

    Examples
    --------
    >>> index = QueryIndex(KnownTriples([np.array([[0, 0, 1], [0, 0, 2], [0, 0, 2]])], num_relations=1))
    >>> index.groups(np.arange(3)).tolist(), index.anchors(np.arange(3)).tolist()
    ([0, 1, 1], [0, 1, 2])
    >>> index.num_answers(np.arange(3)).tolist()
    [2, 1, 1]
    """

    def __init__(self, known: KnownTriples) -> None:
        tails, heads = (known.directions(side)[0] for side in (Side.TAIL, Side.HEAD))
        self._directions, self._half = (tails, heads), len(tails.keys)
        self.num_relations = len(tails.starts) - 1
        # Where the answers of each side and relation begin, and where the last ones end: (2R + 1,).
        self._bounds = np.concatenate([tails.starts[:-1], self._half + heads.starts])
        first = [tails.first_answers(), heads.first_answers() + self._half, self._bounds[-1:]]
        self.starts = np.concatenate(first)

    def groups(self, query_ids: Ids) -> Ids:
        """Return the relation of each query, (n,), plus R where the head is missing."""
        return np.searchsorted(self._bounds, self.starts[query_ids], side="right") - 1

    def group_sizes(self) -> Ids:
        """Return the number of queries of each side and relation, (2R,)."""
        return np.diff(np.searchsorted(self.starts[:-1], self._bounds))

    def anchors(self, query_ids: Ids) -> Ids:
        """Return the given entity of each query, (n,)."""
        places = self.starts[query_ids]
        anchors, lacks_head = np.empty(len(places), np.int64), places >= self._half
        for direction, offset, mask in zip(self._directions, (0, self._half), (~lacks_head, lacks_head)):
            anchors[mask] = direction.given(places[mask] - offset)
        return anchors

    def blocks(self) -> Iterator[tuple[int, int, npt.NDArray[np.integer]]]:
        offset = 0
        for direction in self._directions:
            answers = direction.answers
            first, stop = np.searchsorted(self.starts[:-1], [offset, offset + len(answers)]).tolist()
            while first < stop:
                # At least one query; more while their answers are few enough.
                end = int(np.searchsorted(self.starts, self.starts[first] + BLOCK_ANSWERS, side="right")) - 1
                end = min(max(end, first + 1), stop)
                run = slice(*(self.starts[[first, end]] - offset))
                yield first, end, answers[run].astype(np.int64)
                first = end
            offset += len(answers)


class QueryRun(NamedTuple):
    """Queries (n,) of a batch for a missing side and a pair of entity types.

    Attributes
    ----------
    ids : (n,) int64
        Numbers in the :class:`QueryIndex`.
    anchors, relations : (n,) int64
        Node ids.
    weights : (n,) float32 or None
    """

    side: Side
    anchor_type: str
    answer_type: str
    ids: Ids
    anchors: Ids
    relations: Ids
    weights: Floats | None


@dataclass(frozen=True)
class QueryBatch:
    """One trainer's share of a global batch of queries.

    Attributes
    ----------
    index : int
        Number of the global batch in the epoch.
    global_size : int
        Number of queries in the global batch, those for relations included, over all trainers.
    """

    epoch: int
    index: int
    global_size: int
    runs: tuple[QueryRun, ...]
    pair_runs: tuple[PairRun, ...]

    def __len__(self) -> int:
        return sum(len(run.ids) for run in self.runs) + sum(len(run.ids) for run in self.pair_runs)


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
    pairs : PairIndex
        Queries (h, ?, t), which an epoch passes over as well, in the same order; there may be none.
    counts_answers : bool
        The weight of a query is the number of its answers by the mean number of all queries; else 1.
    """

    index: QueryIndex
    layout: PartitionLayout
    types: Sequence[tuple[str, str]]
    batch_size: int
    place_of_trainer: tuple[int, int, int]
    seed: int
    pairs: PairIndex
    counts_answers: bool = False

    def __post_init__(self) -> None:
        types = self.types
        self._num_queries = len(self.index) + len(self.pairs)
        num_answers = int(self.index.starts[-1]) + int(self.pairs.starts[-1])
        self._mean_answers = num_answers / max(self._num_queries, 1)
        self._relation_nodes = np.asarray(self.layout.edge_ids(RELATION))
        # A kind is a side and a pair of types; queries of one kind are looked up and scored together.
        kinds = sorted({(side, *pair) for pair in types for side in (0, 1)})
        number = {kind: i for i, kind in enumerate(kinds)}
        self._kind_of = np.array([number[(side, *pair)] for side in (0, 1) for pair in types], np.int64)
        # The missing side and the types of the given entity and of the answers.
        self._kinds = [(Side.HEAD, rhs, lhs) if side else (Side.TAIL, lhs, rhs) for side, lhs, rhs in kinds]
        # Kinds of pairs are numbered after them.
        self._given_types = [given for _, given, _ in self._kinds] + [lhs for lhs, _ in self.pairs.kinds]

    def asks_for(self, entity_type: str) -> Mask:
        """Return a mask (Q,) of the queries with answers of an entity type."""
        asks = np.array([answer_type == entity_type for _, _, answer_type in self._kinds], bool)
        return np.repeat(asks[self._kind_of], self.index.group_sizes())

    def __len__(self) -> int:
        return triple_order.num_batches(self._num_queries, self.batch_size)

    def batch(self, epoch: int, index: int, enter: Callable[[str], None] = ignore_phase) -> QueryBatch:
        enter("order")
        positions = triple_order.window(index, self.batch_size, self._num_queries)
        ids = triple_order.inverse_permute(positions, self._num_queries, self.seed, epoch)
        enter("edges")
        # Selected by a lookup, as the whole index is on every trainer; no ids travel.
        if self.layout.num_parts > 1:
            ids = ids[self._given(ids)[1] >= 0]
        ids = ids[trainer_share(len(ids), *self.place_of_trainer[1:])]
        kinds, nodes = self._given(ids)
        order = np.argsort(kinds, kind="stable")
        ids, kinds, nodes = ids[order], kinds[order], nodes[order]
        runs, pair_runs = [], []
        for kind, run in self._runs(kinds):
            if kind < len(self._kinds):
                runs.append(self._query_run(kind, ids[run], nodes[run]))
            else:
                pair_runs.append(self._pair_run(kind - len(self._kinds), ids[run], nodes[run]))
        return QueryBatch(epoch, index, len(positions), tuple(runs), tuple(pair_runs))

    def _query_run(self, kind: int, ids: Ids, anchors: Ids) -> QueryRun:
        relations = self._relation_nodes[self.index.groups(ids) % self.index.num_relations]
        return QueryRun(*self._kinds[kind], ids, anchors, relations, self._weights(self.index, ids))

    def _pair_run(self, kind: int, ids: Ids, heads: Ids) -> PairRun:
        (lhs, rhs), ids = self.pairs.kinds[kind], ids - len(self.index)
        tails = self.layout.node_ids(rhs)[self.pairs.tails[ids]].astype(np.int64)
        times, weights = self.pairs.times[ids].astype(np.int64), self._weights(self.pairs, ids)
        return PairRun(lhs, rhs, ids, heads, tails, times, weights)

    def _weights(self, index: AnswerIndex, query_ids: Ids) -> Floats | None:
        """Return the weights (n,) of queries."""
        if not self.counts_answers:
            return None
        return (index.num_answers(query_ids) / self._mean_answers).astype(np.float32)

    def _given(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return kind and given entity of queries and, after the kinds of these, of pairs, (n,) each.

        The entities are node ids, -1 where they lie on another machine: a query belongs to that of its given
        entity, whose row is read from shared memory.
        """
        is_pair = ids >= len(self.index)
        kinds, entities, nodes = np.empty_like(ids), np.empty_like(ids), np.empty_like(ids)
        kinds[~is_pair] = self._kind_of[self.index.groups(ids[~is_pair])]
        entities[~is_pair] = self.index.anchors(ids[~is_pair])
        pair_ids = ids[is_pair] - len(self.index)
        kinds[is_pair] = len(self._kinds) + self.pairs.kind_of[pair_ids]
        entities[is_pair] = self.pairs.heads[pair_ids]
        order = np.argsort(kinds, kind="stable")
        for kind, part in self._runs(kinds[order]):
            run, name = order[part], self._given_types[kind]
            nodes[run] = self.layout.node_ids(name)[entities[run]]
            first, stop = self.layout.node_range(name, self.place_of_trainer[0])
            nodes[run[(nodes[run] < first) | (nodes[run] >= stop)]] = -1
        return kinds, nodes

    def _runs(self, kinds: Ids) -> Iterator[tuple[int, slice]]:
        """Yield each kind that occurs among ascending ones, with its run."""
        bounds = np.searchsorted(kinds, np.arange(len(self._given_types) + 1)).tolist()
        for kind, (start, end) in enumerate(zip(bounds, bounds[1:])):
            if end > start:
                yield kind, slice(start, end)


class ShardAnswers:
    """Answers of all queries among the rows of one shard, a run [first, stop) of node ids.

    Rows of the shard that answer query i are ``places[starts[i]:starts[i + 1]]``. ``is_asked`` (Q,) marks the
    queries with answers in the shard's table.
    """

    def __init__(self, index: AnswerIndex, is_asked: Mask, node_ids: Ids, first: int, stop: int) -> None:
        self.starts: Ids = np.zeros(len(index) + 1, np.int64)
        # Half as wide as ids, as a trainer keeps the place of each answer.
        places = [np.empty(0, np.int32)]
        for start, end, answers in index.blocks():
            query_of = np.repeat(np.arange(end - start), np.diff(index.starts[start : end + 1]))
            kept = np.flatnonzero(is_asked[start:end][query_of])
            nodes = node_ids[answers[kept]]
            is_here = (nodes >= first) & (nodes < stop)
            self.starts[start + 1 : end + 1] = np.bincount(query_of[kept[is_here]], minlength=end - start)
            places.append((nodes[is_here] - first).astype(np.int32))
        np.cumsum(self.starts, out=self.starts)
        self.places = np.concatenate(places)

    def of(self, query_ids: Ids) -> tuple[Ids, Ids]:
        """Return (starts, places) of some queries, in CSR form as above."""
        counts = self.starts[query_ids + 1] - self.starts[query_ids]
        starts = np.append(0, np.cumsum(counts))
        return starts, self.places[spans(self.starts[query_ids], counts)[1]].astype(np.int64)


TrainingBatch = EdgeBatch | QueryBatch
TrainingBatches = EdgeBatches | QueryBatches
"""Batches of an epoch: of edges, or of queries."""
