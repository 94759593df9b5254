"""Loss of edges against all entities of the answer's type, and relation prediction beside it.

Of each edge, (h, r, ?) is scored against every possible tail and (?, r, t) against every possible head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dglkge.model.kge_model import KgeModel
from dglkge.model.regularizers import Regularizer
from dglkge.optim.scratch import Scratch
from dglkge.step.contracts import Rows
from dglkge.step.objectives.all_candidates import ModelQueries, Piece, QueryMaker, QueryOptions, TakeBack
from dglkge.step.objectives.dot_queries import CompiledQueries, EdgePenalty, QueryRuns, loop_weights
from dglkge.step.objectives.relation_prediction import RelationQueries, relation_pieces
from dglkge.step.planning import Plan
from dglkge.typing import Side

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def places_on(places: Ids | None, device: torch.device) -> Tensor | None:
    """Return places on a device, None where there are none."""
    return None if places is None else torch.from_numpy(places).to(device)


class AutogradQueries(ModelQueries):
    """Queries of triples."""

    def make(self, plan: Plan, rows: Rows) -> tuple[list[Piece], TakeBack]:
        model, pieces = self._model, []
        total = torch.zeros(())
        for group in plan.groups:
            factors = group.factors(plan.divisor)
            heads, relations, tails = map(rows.leaf, (group.heads, group.relations, group.tails))
            places, ids = (
                places_on(array, heads.device) for array in (group.relation_places, group.relation_ids)
            )
            for side, anchors, answers, block, keys in (
                (Side.TAIL, heads, tails, group.rhs, group.tail_ids),
                (Side.HEAD, tails, heads, group.lhs, group.head_ids),
            ):
                query = model.query(anchors, relations, side, ids, places)
                pieces.append(Piece(block, query, keys, factors))
                if self._regularizer is not None:
                    rows_of_query = (anchors, relations, answers, side, query, places)
                    penalty = self._regularizer.penalties(model, *rows_of_query)
                    weights = torch.from_numpy(factors).to(penalty.device)
                    total = total + (penalty * weights).sum()
            if self._relation_weight:
                weighted = np.float32(self._relation_weight) * factors
                pieces += relation_pieces(model, *2 * (group.relation_ids,), heads, tails, weighted)
        return pieces, functools.partial(differentiated, [piece.queries for piece in pieces], total)


def differentiated(queries: Sequence[Tensor], penalty: Tensor, gradients: Sequence[Tensor]) -> float:
    """Write the gradients of the rows, given those of queries on the host; returns the penalty."""
    tensors = list(queries)
    outer = [gradient.to(query.device) for query, gradient in zip(queries, gradients)]
    if penalty.requires_grad:
        # One backward pass for queries and penalty, which have the same leaves.
        tensors, outer = [*tensors, penalty], [*outer, torch.ones_like(penalty)]
    if tensors:
        torch.autograd.backward(tensors, outer)
    return penalty.item()


def has_loops(model: KgeModel, regularizer: Regularizer | None) -> bool:
    """Return whether :class:`LoopQueries` computes the gradients of a model and a regularizer."""
    is_plain = type(model) is KgeModel and model.score_function.compiled
    return is_plain and (regularizer is None or loop_weights(model, regularizer) is not None)


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
            of_queries = torch.cat(list(gradients[: len(pieces)]))
            penalty = queries.differentiate(of_queries, none, none, np.concatenate(each_factors))
            return penalty + relations_back(gradients[len(pieces) :])

        return pieces + relation_queries, take_back
