"""Loss of edges against all entities of the answer's type, and relation prediction beside it.

Of each edge, (h, r, ?) is scored against every possible tail and (?, r, t) against every possible head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from dglkge.embeddings.found_rows import FoundRows
from dglkge.kernels import dot as dot_kernels
from dglkge.model.kge_model import KgeModel
from dglkge.model.regularizers import Regularizer
from dglkge.optim.scratch import Scratch
from dglkge.step.contracts import Rows
from dglkge.step.objectives.all_candidates import ModelQueries, Piece, QueryMaker, QueryOptions, TakeBack
from dglkge.step.objectives.penalties import GroupPenalty, loop_weights
from dglkge.step.objectives.relation_prediction import RelationQueries, relation_pieces
from dglkge.step.planning import Group, Plan
from dglkge.typing import Side

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def make_queries(
    model: KgeModel,
    anchors: torch.Tensor,
    relations: torch.Tensor,
    side: Side,
    relation_ids: Ids,
    places: torch.Tensor | None,
) -> torch.Tensor:
    """Return the queries (B, Dq) of entities and relations, by autograd.

    Parameters
    ----------
    model : KgeModel
    anchors : (B, D) tensor
    relations : (B, ...) or (U, ...) tensor
    side : Side
    relation_ids : (B,) int64
    places : (B,) int64 tensor or None
        Where relations have one row each (U): the place of each query's.
    """
    if places is not None:
        return model.shared_query(anchors, relations, places, side)
    return model.query(anchors, relations, side, torch.from_numpy(relation_ids).to(anchors.device))


def places_on(places: Ids | None, device: torch.device) -> torch.Tensor | None:
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
            places = places_on(group.relation_places, heads.device)
            for side, anchors, answers, block, keys in (
                (Side.TAIL, heads, tails, group.rhs, group.tail_ids),
                (Side.HEAD, tails, heads, group.lhs, group.head_ids),
            ):
                query = make_queries(model, anchors, relations, side, group.relation_ids, places)
                pieces.append(Piece(block, query, keys, factors))
                if self._regularizer is not None:
                    penalty = self._regularizer.of_query(query, answers)
                    if penalty is None:
                        own_rows = relations if places is None else relations[places]
                        penalty = model.penalty(self._regularizer, anchors, own_rows, answers, side)
                    weights = torch.from_numpy(factors).to(penalty.device)
                    total = total + (penalty * weights).sum()
            if self._relation_weight:
                weighted = np.float32(self._relation_weight) * factors
                pieces += relation_pieces(model, group.relation_ids, heads, tails, weighted)
        return pieces, functools.partial(differentiated, [piece.queries for piece in pieces], total)


def differentiated(
    queries: Sequence[torch.Tensor], penalty: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> float:
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
    """Queries and penalties of DistMult and ComplEx, by compiled loops, from rows in place.

    Parameters
    ----------
    options : QueryOptions
        With a regularizer that has loops; see :func:`has_loops`.
    """

    reads_in_place = True
    shares_relations = False

    def __init__(self, options: QueryOptions) -> None:
        model = self._model = options.model
        self._operator = (model.score_function.complex_valued, model.reciprocal)
        self._penalty = GroupPenalty(model, options.regularizer)
        self._of_relations = RelationQueries(model, options.relation_weight)
        self._scratch = Scratch()

    def make(self, plan: Plan, rows: Rows) -> tuple[list[Piece], TakeBack]:
        groups = [(group, group.factors(plan.divisor)) for group in plan.groups]
        num = sum(len(group) for group, _ in groups)
        room = self._scratch.take("queries", 2 * num, self._model.dim)
        pieces: list[Piece] = []
        start = 0
        for group, factors in groups:
            middle, end = start + len(group), start + 2 * len(group)
            # The loop also writes scores of the true and own entities; here the shards compute the true ones.
            unused = self._scratch.take("scores", 2, end - start).numpy()
            found = _found(group, rows)
            dot_kernels.make_queries(
                tuple(one.addresses for one in found),
                self._operator,
                room[start:end].numpy(),
                unused[0],
                unused[1],
            )
            pieces += [
                Piece(group.rhs, room[start:middle], group.tail_ids, factors),
                Piece(group.lhs, room[middle:end], group.head_ids, factors),
            ]
            start = end
        relation_queries, relations_back = self._of_relations.make(plan, rows)

        def take_back(gradients: Sequence[torch.Tensor]) -> float:
            loss = self._take_back(groups, rows, gradients)
            return loss + relations_back(gradients[2 * len(groups) :])

        return pieces + relation_queries, take_back

    def _take_back(
        self, groups: Sequence[tuple[Group, Floats]], rows: Rows, gradients: Sequence[torch.Tensor]
    ) -> float:
        """Write the gradients of the rows from those of the queries of both sides; returns the penalty."""
        loss = 0.0
        for number, (group, factors) in enumerate(groups):
            of_queries = torch.cat(list(gradients[2 * number : 2 * number + 2])).numpy()
            # The answers' own shares are gradients of candidates, which are with the shards.
            none = np.zeros(2 * len(group), np.float32)
            found = _found(group, rows)
            loss += dot_kernels.write_gradients(
                tuple(one.addresses for one in found),
                self._operator,
                of_queries,
                (none, none),
                factors,
                self._penalty.n3,
                tuple(
                    rows.gradients(places).numpy() for places in (group.heads, group.tails, group.relations)
                ),
            )
            loss += self._penalty.add(group, rows, factors)
        return loss


def _found(group: Group, rows: Rows) -> list[FoundRows]:
    """Return the rows of heads, tails and relations; keep them until a loop has read their addresses."""
    return [rows.found(places) for places in (group.heads, group.tails, group.relations)]
