"""Plans of batches: which rows a batch reads, drawn negatives included, before any row is read.

Step 3 of a batch. :class:`EdgePlanner` plans batches of edges, :class:`QueryPlanner` batches of queries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.sampling.negatives import KnownAnswers, KnownNegatives, NegativeSampler
from dglkge.sampling.query_batches import QueryBatch
from dglkge.typing import RELATION, Floats, Ids, Mask, Side

RangeOf = Callable[[str, Ids], Ids]
"""Returns the range (n,) of each node (n,) of an entity type."""

Upload = Callable[[np.ndarray], Any]
"""Adds an array (n,) to what is copied to a device; the result has it there as ``tensor`` afterwards."""


class Places(NamedTuple):
    """Consecutive places (n,) among the rows of one table in a batch, and the node ids of the rows."""

    table: str
    run: slice
    ids: Ids


class RowIds:
    """Collects the ids that a batch reads, by table, in the order of the tables.

    A row has a place for each time that it is asked for. Equal ids are merged by the optimizer, which has to
    merge the gradients of all trainers anyway.
    """

    def __init__(self, tables: Iterable[str]) -> None:
        self._runs: dict[str, list[Ids]] = {name: [] for name in tables}
        self._sizes = dict.fromkeys(self._runs, 0)

    def add(self, table: str, node_ids: Ids) -> Places:
        """Ask for the rows of node ids (n,)."""
        start = self._sizes[table]
        self._sizes[table] += len(node_ids)
        self._runs[table].append(node_ids)
        return Places(table, slice(start, self._sizes[table]), node_ids)

    def joined(self) -> dict[str, torch.Tensor]:
        """Return all ids (n,) of each table, with repetitions."""
        none = np.empty(0, np.int64)
        return {name: torch.from_numpy(np.concatenate([none, *runs])) for name, runs in self._runs.items()}


class PlannedGroup:
    """Edges or queries that are scored at once, with weights (B,), None: all 1."""

    weights: Floats | None

    def __len__(self) -> int:
        raise NotImplementedError

    def factors(self, divisor: int) -> Floats:
        """Return the factor (B,) of the loss of each: its weight by the plan's divisor."""
        factors = np.full(len(self), 1 / divisor, np.float32)
        return factors if self.weights is None else factors * self.weights

    def staged(self, upload: Upload) -> PlannedGroup:
        """Return the group with what its loss takes besides rows on a device: here nothing."""
        return self


@dataclass(frozen=True)
class Plan:
    """What a batch reads.

    Attributes
    ----------
    number : int
        That no other batch of any epoch has; the same on every trainer.
    divisor : int
        By which summed losses are divided before the backward pass: the size of the global batch, or 1.
    ids : mapping of str to (n,) int64 tensor
        By table, in the order of the tables: node ids of the rows that are fetched.
    groups : sequence of PlannedGroup
        Those of the objective that made the plan.
    pairs : sequence of PairGroup
        Queries (h, ?, t) beside queries for entities.
    staged : object
        What the row store has prepared for the plan.
    """

    number: int
    divisor: int
    ids: Mapping[str, torch.Tensor]
    groups: Sequence[Any]
    pairs: Sequence[PairGroup] = ()
    staged: Any = None


class AnswerRanges(NamedTuple):
    """Which rows of the queries of one side are in the first of their bucket's two ranges.

    Of the queries' own entities (B,), of the true answers (B,) and of the negatives (N,). See
    :mod:`dglkge.sampling.range_negatives`; which of the two is the first has no meaning.
    """

    anchors: Mask
    truths: Mask
    negatives: Mask


@dataclass
class Group(PlannedGroup):
    """Edges of a batch that join the same pair of entity types and share their negatives.

    Attributes
    ----------
    lhs, rhs : str
        Entity types.
    head_ids, tail_ids : (B,) int64
        Node ids.
    weights : (B,) float32 or None
    heads, relations, tails : Places
    negatives : mapping of Side to Places
        Of the sides that are trained. The same object for both where the entity types and the sampler are
        the same.
    known : mapping of Side to KnownNegatives
        Known answers, where they do not count as negatives.
    labels : (B,) float32 or None
        Confidences that the edges are true.
    relation_places : (B,) int64 or None
        Where ``relations`` holds each relation once (U,): the place there of each edge's.
    inputs : GroupInputs or None
        What the loss takes besides rows, where that is copied to a device.
    ranges : mapping of Side to AnswerRanges
        Of the sides that are trained; empty where no score depends on them.
    chunk : int
        Number of its chunk in the batch: groups of one chunk may share negatives.
    """

    lhs: str
    rhs: str
    head_ids: Ids
    tail_ids: Ids
    weights: Floats | None
    heads: Places
    relations: Places
    tails: Places
    negatives: Mapping[Side, Places]
    known: Mapping[Side, KnownNegatives] = field(default_factory=dict)
    labels: Floats | None = None
    relation_places: Ids | None = None
    inputs: Any = None
    ranges: Mapping[Side, AnswerRanges] = field(default_factory=dict)
    chunk: int = 0

    @property
    def relation_ids(self) -> Ids:
        """Node id of each edge's relation, (B,)."""
        ids = self.relations.ids
        return ids if self.relation_places is None else ids[self.relation_places]

    def __len__(self) -> int:
        return len(self.head_ids)

    def staged(self, upload: Upload) -> Group:
        return dataclasses.replace(self, inputs=None if self.inputs is None else self.inputs.mapped(upload))


InputsOf = Callable[[Group], Any]
"""Returns the :attr:`~Group.inputs` of a group."""


@dataclass(frozen=True)
class QueryGroup(PlannedGroup):
    """Queries of a batch of one side, that of the missing entity, and pair of entity types.

    ``relation_ids`` (B,) are node ids. Where ``relations`` holds each relation once (U,), ``relation_places``
    (B,) are the places there of each query's, else None.
    """

    side: Side
    answer_type: str
    query_ids: Ids
    anchors: Places
    relations: Places
    relation_ids: Ids
    relation_places: Ids | None
    weights: Floats | None

    def __len__(self) -> int:
        return len(self.query_ids)


@dataclass(frozen=True)
class PairGroup(PlannedGroup):
    """Queries (h, ?, t) of a batch with the same entity types; ``times`` (B,) are numbers."""

    pair_ids: Ids
    times: Ids
    heads: Places
    tails: Places
    weights: Floats | None

    def __len__(self) -> int:
        return len(self.pair_ids)


@dataclass
class EdgePlanner:
    """Plans batches of edges: groups by pair of entity types and chunk, with their negatives.

    Groups of one chunk share negatives by entity type and sampler.

    Attributes
    ----------
    tables : sequence of str
        Names of all tables, in their order.
    pairs : sequence of (str, str)
        Entity types of the heads and tails of each edge type.
    samplers : mapping of Side to NegativeSampler
        Of the sides that are trained; empty: the groups have no negatives.
    sums_batch : bool
        Train the sum over a global batch instead of its mean.
    known : KnownAnswers, optional
        Answers that are no negatives.
    range_of : callable, optional
        Returns the ranges of nodes, where scores depend on them.
    """

    tables: Sequence[str]
    pairs: Sequence[tuple[str, str]]
    samplers: Mapping[Side, NegativeSampler]
    sums_batch: bool = False
    known: KnownAnswers | None = None
    range_of: RangeOf | None = None

    def plan(
        self, batch: EdgeBatch, shares_relations: bool = False, inputs_of: InputsOf | None = None
    ) -> Plan:
        """Draw the negatives of a batch and ask for all its rows.

        With ``shares_relations`` the row of a relation is asked for once for all edges of a group;
        ``inputs_of`` returns the ``inputs`` of a group.
        """
        ids = RowIds(self.tables)
        drawn: dict[tuple[int, str, int], Places] = {}

        def negatives(side: Side, entity_type: str, chunk: int) -> Places:
            # Drawn once for each chunk and type: its rows are fetched and updated once for all groups.
            key = (chunk, entity_type, id(self.samplers[side]))
            if key not in drawn:
                drawn[key] = ids.add(entity_type, self.samplers[side].sample(entity_type, batch, chunk))
            return drawn[key]

        groups, sides = [], [side for side in Side if side in self.samplers]
        for edges in batch.groups:
            run = slice(edges.start, edges.end)
            lhs, rhs = self.pairs[edges.pair]
            heads, relations, tails = batch.heads[run], batch.relations[run], batch.tails[run]
            distinct, relation_places = _distinct(relations, shares_relations)
            places = (ids.add(lhs, heads), ids.add(RELATION, distinct), ids.add(rhs, tails))
            entities = {Side.HEAD: (lhs, heads), Side.TAIL: (rhs, tails)}
            drawn_of = {side: negatives(side, entities[side][0], edges.chunk) for side in sides}
            known: dict[Side, KnownNegatives] = {}
            if self.known is not None:
                for side, (answer_type, _, negative_ids) in drawn_of.items():
                    answers = (answer_type, negative_ids)
                    known[side] = self.known.among(side, *entities[side.other], relations, *answers)
            weights, labels = _part(batch.weights, run), _part(batch.labels, run)
            facts = (weights, *places, drawn_of, known, labels, relation_places)
            ranges = self._ranges(entities, drawn_of)
            group = Group(lhs, rhs, heads, tails, *facts, ranges=ranges, chunk=edges.chunk)
            if inputs_of is not None:
                group.inputs = inputs_of(group)
            groups.append(group)
        divisor = 1 if self.sums_batch else batch.global_size
        return Plan(number_of(batch), divisor, ids.joined(), groups)

    def _ranges(
        self, entities: Mapping[Side, tuple[str, Ids]], drawn: Mapping[Side, Places]
    ) -> dict[Side, AnswerRanges]:
        """Return which rows are in the first range of their bucket; empty where no score depends on it."""
        if self.range_of is None:
            return {}
        ranges = {side: self.range_of(*nodes) for side, nodes in entities.items()}
        # A chunk is of one bucket: its rows are in two ranges, that of the first head and the other one.
        first = ranges[Side.HEAD][0]
        is_first = {side: numbers == first for side, numbers in ranges.items()}
        answers = {side: self.range_of(places.table, places.ids) == first for side, places in drawn.items()}
        return {side: AnswerRanges(is_first[side.other], is_first[side], answers[side]) for side in drawn}


@dataclass
class QueryPlanner:
    """Plans batches of queries that are compared with all candidates; fields as of :class:`EdgePlanner`."""

    tables: Sequence[str]
    sums_batch: bool = False

    def plan(self, batch: QueryBatch, shares_relations: bool = False) -> Plan:
        """Ask for the rows of a batch's queries; ``shares_relations`` as in :meth:`EdgePlanner.plan`."""
        ids = RowIds(self.tables)
        groups, pair_groups = [], []
        for run in batch.runs:
            distinct, places = _distinct(run.relations, shares_relations)
            rows = ids.add(run.anchor_type, run.anchors), ids.add(RELATION, distinct)
            facts = (*rows, run.relations, places, run.weights)
            groups.append(QueryGroup(run.side, run.answer_type, run.ids, *facts))
        for pairs in batch.pair_runs:
            heads, tails = ids.add(pairs.lhs, pairs.heads), ids.add(pairs.rhs, pairs.tails)
            pair_groups.append(PairGroup(pairs.ids, pairs.times, heads, tails, pairs.weights))
        divisor = 1 if self.sums_batch else batch.global_size
        return Plan(number_of(batch), divisor, ids.joined(), groups, pair_groups)


def _distinct(relations: Ids, shares_relations: bool) -> tuple[Ids, Ids | None]:
    """Return the relations whose rows are asked for, and the place of each one among them if it is shared."""
    return np.unique(relations, return_inverse=True) if shares_relations else (relations, None)


def _part(values: Floats | None, run: slice) -> Floats | None:
    """Return a run of values, where there are some."""
    return None if values is None else values[run]


def number_of(batch: Any) -> int:
    """Return a number that no other batch of any epoch has, of any kind."""
    # Also the batch number that trainers compare in the exchange of ids.
    return (batch.epoch << 32) + batch.index
