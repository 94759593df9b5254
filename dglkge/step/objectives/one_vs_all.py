"""Losses against all entities of the answer's type, of edges or of queries with all their answers; and
relations.

Of each edge, (h, r, ?) is scored against every possible tail and (?, r, t) against every possible head.

K-vs-all (KvsAll, Dettmers et al. 2018) has one query for all edges that share it. Where a loss compares
answers (softmax, pairs), each of k answers has label 1 / k and the query weight k, so that an epoch of
softmax has the loss and the gradients of all edges one by one; else each answer has label 1. The regularizer
takes the given entity, the relation and the mean over the answers of each query, with the query's weight; the
answers' part is computed where their rows are stored.

Relation prediction scores (h, ?, t) against all relations, beside the loss of the entities. Chen et al. 2021,
"Relation prediction as an auxiliary training objective for improving multi-relational graph representations":
its loss is added, times a weight. Reciprocal relations are candidates in both directions, as theirs are.
Relations are few, so that all of them are candidates with every objective; their table is sharded over the
trainers as entities are in ``one_vs_all``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dglkge.model.kge_model import KgeModel
from dglkge.model.regularizers import Regularizer
from dglkge.optim.workspace import Scratch
from dglkge.sampling.query_batches import AnswerIndex, ShardAnswers
from dglkge.step.contracts import Gradients, Objective, Rows
from dglkge.step.objectives.all_candidates import ModelQueries, Piece, QueryMaker, QueryOptions, TakeBack
from dglkge.step.objectives.dot_queries import CompiledQueries, EdgePenalty, QueryRuns
from dglkge.step.objectives.shard_objective import Answers
from dglkge.step.planning import Places, Plan
from dglkge.typing import RELATION, Floats, Ids, Side


def relation_pieces(
    model: KgeModel, keys: Ids, times: Ids, heads: Tensor, tails: Tensor, factors: Floats
) -> list[Piece]:
    """Return the queries (h, ?, t), and (t, ?, h) for reciprocal relations.

    ``keys`` (B,) determine the answers of each query: the node id of the relation itself, where there is one;
    ``times`` (B,) as of :meth:`KgeModel.relation_query`.
    """
    # Without reciprocal rows both directions have the same scores: one query with twice the factor.
    pairs = [(heads, tails), (tails, heads)] if model.reciprocal else [(heads, tails)]
    queries = [model.relation_query(*pair, torch.from_numpy(times)) for pair in pairs]
    num, factors = len(pairs), 2 // len(pairs) * factors
    return [Piece(RELATION, query, num * keys + place, factors) for place, query in enumerate(queries)]


class RelationQueries(QueryMaker):
    """Queries (h, ?, t) of groups of edges, and their gradients; weight 0: no queries.

    Gradients are added to those that the rows have already. Rows are copied in any case, unless they are on a
    device.
    """

    reads_in_place = True
    shares_relations = False

    def __init__(self, model: KgeModel, weight: float, is_staged: bool = False) -> None:
        self._model = model
        self._weight = np.float32(weight)
        self._is_staged = is_staged

    def make(self, plan: Plan, rows: Rows) -> tuple[list[Piece], TakeBack]:
        leaves: list[tuple[Places, Tensor]] = []
        pieces: list[Piece] = []
        for group in plan.groups if self._weight else ():
            heads, tails = (self._leaf(places, rows) for places in (group.heads, group.tails))
            factors = self._weight * group.factors(plan.divisor)
            ids = group.relation_ids
            pieces += relation_pieces(self._model, ids, ids, heads, tails, factors)
            leaves += [(group.heads, heads), (group.tails, tails)]
        queries = [piece.queries for piece in pieces]

        def take_back(gradients: Sequence[Tensor]) -> float:
            if queries:
                outer = [gradient.to(query.device) for query, gradient in zip(queries, gradients)]
                torch.autograd.backward(queries, outer)
            for places, leaf in leaves if not self._is_staged else ():
                if leaf.grad is not None:
                    rows.gradients(places).add_(leaf.grad)
            return 0.0

        return pieces, take_back

    def _leaf(self, places: Places, rows: Rows) -> Tensor:
        """Return rows as a leaf; on a device its gradient is added to those of the rows."""
        return rows.leaf(places) if self._is_staged else rows.in_place(places).copied().requires_grad_()


@dataclass
class WithRelations(Objective):
    """An objective of batches of edges, and relation prediction beside it, whose gradients are added; a
    collective.
    """

    objective: Objective
    relations: Objective

    def __post_init__(self) -> None:
        self.reads_in_place = self.objective.reads_in_place

    @property
    def sent_bytes(self) -> int:
        return self.objective.sent_bytes + self.relations.sent_bytes

    def plan(self, batch: Any) -> Plan:
        return self.objective.plan(batch)

    def gradients(self, plan: Plan, rows: Rows) -> Callable[[], Gradients]:
        # In this order: compiled loops write the gradients of the rows, to which the relations' are added.
        # Without triples of its own a trainer still scores its relations for the others.
        waiting = self.objective.gradients(plan, rows), self.relations.gradients(plan, rows)

        def finish() -> Gradients:
            entity, relation = (wait() for wait in waiting)
            candidates = [*entity.candidates, *relation.candidates]
            return Gradients(entity.loss + relation.loss, candidates, entity.measures)

        return finish


def relations_on(group: Any, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the ids of a group's relations, and their places or None, on a device."""
    ids, places = group.relation_ids, group.relation_places
    there = None if places is None else torch.from_numpy(places).to(device)
    return torch.from_numpy(ids).to(device), there


class AutogradQueries(ModelQueries):
    """Queries of triples."""

    def make(self, plan: Plan, rows: Rows) -> tuple[list[Piece], TakeBack]:
        model, pieces = self._model, []
        total = torch.zeros(())
        for group in plan.groups:
            factors = group.factors(plan.divisor)
            heads, relations, tails = map(rows.leaf, (group.heads, group.relations, group.tails))
            numbers = relations_on(group, heads.device)
            for side, anchors, answers, block, keys in (
                (Side.TAIL, heads, tails, group.rhs, group.tail_ids),
                (Side.HEAD, tails, heads, group.lhs, group.head_ids),
            ):
                query, penalty = self._made(side, anchors, relations, answers, *numbers)
                pieces.append(Piece(block, query, keys, factors))
                if penalty is not None:
                    weights = torch.from_numpy(factors).to(penalty.device)
                    total = total + (penalty * weights).sum()
            if self._relation_weight:
                weighted = np.float32(self._relation_weight) * factors
                pieces += relation_pieces(model, *2 * (group.relation_ids,), heads, tails, weighted)
        return pieces, functools.partial(differentiated, [piece.queries for piece in pieces], total)


def differentiated(queries: Sequence[Tensor], penalty: Tensor, gradients: Sequence[Tensor]) -> float:
    """Write the gradients of the rows, given those of queries on the host; returns the penalty."""
    outer = [gradient.to(query.device) for query, gradient in zip(queries, gradients)]
    if penalty.requires_grad:
        # One backward pass for queries and penalty, which have the same leaves.
        queries, outer = [*queries, penalty], [*outer, torch.ones_like(penalty)]
    if queries:
        torch.autograd.backward(queries, outer)
    return penalty.item()


def has_loops(model: KgeModel, regularizer: Regularizer | None) -> bool:
    """Return whether :class:`LoopQueries` computes the gradients of a model and a regularizer."""
    is_plain = type(model) is KgeModel and model.score_function.compiled
    return is_plain and (regularizer is None or regularizer.compiled)


def edge_queries(options: QueryOptions) -> QueryMaker:
    """Return the queries of triples: by compiled loops where there are some, else by autograd."""
    is_compiled = options.has_loops and has_loops(options.model, options.regularizer)
    return LoopQueries(options) if is_compiled else AutogradQueries(options)


class LoopQueries(QueryMaker):
    """Queries and penalties of DistMult and ComplEx, by compiled loops, from rows in place; see
    :func:`has_loops`.
    """

    reads_in_place = True
    shares_relations = False

    def __init__(self, options: QueryOptions) -> None:
        model = self._model = options.model
        self._queries = functools.partial(CompiledQueries, model, EdgePenalty(model, options.regularizer))
        self._relation_queries = RelationQueries(model, options.relation_weight)
        self._scratch = Scratch()

    def make(self, plan: Plan, rows: Rows) -> tuple[list[Piece], TakeBack]:
        pieces: list[Piece] = []
        runs, each_factors, start = [], [], 0
        room = self._scratch.take("queries", 2 * sum(map(len, plan.groups)), self._model.dim)
        for group in plan.groups:
            middle, end = start + len(group), start + 2 * len(group)
            runs.append({Side.TAIL: slice(start, middle), Side.HEAD: slice(middle, end)})
            factors = group.factors(plan.divisor)
            each_factors.append(factors)
            pieces += [
                Piece(group.rhs, room[start:middle], group.tail_ids, factors),
                Piece(group.lhs, room[middle:end], group.head_ids, factors),
            ]
            start = end
        relation_queries, relations_back = self._relation_queries.make(plan, rows)
        if not plan.groups:
            return relation_queries, relations_back
        queries = self._queries(QueryRuns(plan.groups, runs), rows)
        # The loop also writes scores of the true and own entities; here the shards compute the true ones.
        queries.write(room, *self._scratch.take("scores", 2, start).numpy())

        def take_back(gradients: Sequence[Tensor]) -> float:
            # The answers' own shares are gradients of candidates, which are with the shards.
            none = np.zeros(start, np.float32)
            query_gradients = torch.cat(list(gradients[: len(pieces)]))
            penalty = queries.differentiate(query_gradients, none, none, np.concatenate(each_factors))
            return penalty + relations_back(gradients[len(pieces) :])

        return pieces + relation_queries, take_back


class AnsweredQueries(ModelQueries):
    """Queries with all their answers."""

    def make(self, plan: Plan, rows: Rows) -> tuple[list[Piece], TakeBack]:
        model = self._model
        pieces: list[Piece] = []
        total = torch.zeros(())
        for group in plan.groups:
            anchors, relations = rows.leaf(group.anchors), rows.leaf(group.relations)
            # Divided by the global batch, as shares of trainers are uneven and gradients are summed.
            factors = group.factors(plan.divisor)
            numbers = relations_on(group, anchors.device)
            query, penalty = self._made(group.side, anchors, relations, None, *numbers)
            pieces.append(Piece(group.answer_type, query, group.query_ids, factors))
            if penalty is not None:
                total = total + (penalty * torch.from_numpy(factors).to(penalty.device)).sum()
        for pairs in plan.pairs:
            share = np.float32(self._relation_weight) * pairs.factors(plan.divisor)
            heads, tails = rows.leaf(pairs.heads), rows.leaf(pairs.tails)
            pieces += relation_pieces(model, pairs.pair_ids, pairs.times, heads, tails, share)
        return pieces, functools.partial(differentiated, [piece.queries for piece in pieces], total)


def all_answers(
    index: AnswerIndex, shard_answers: ShardAnswers, splits_labels: bool, penalizes: bool
) -> Callable[[Ids], Answers]:
    """Return the answers of queries, by number, among the rows of a shard.

    ``splits_labels``: each of a query's k answers has label 1 / k, else 1. ``penalizes``: they are
    regularized.
    """

    def answers_of(query_ids: Ids) -> Answers:
        starts, places = shard_answers.of(query_ids)
        # The count of all answers, not of the shard's: labels sum to 1 over all shards.
        equal_parts = np.repeat((1 / index.num_answers(query_ids)).astype(np.float32), np.diff(starts))
        shares = equal_parts if splits_labels else np.ones(len(places), np.float32)
        return Answers(starts, places, shares, equal_parts if penalizes else None)

    return answers_of
