"""Relation prediction: (h, ?, t) against all relations, beside the loss of the entities.

Chen et al. 2021, "Relation prediction as an auxiliary training objective for improving multi-relational
graph representations": its loss is added, times a weight. Relations are few, so that all of them
are candidates with every objective; their table is sharded over the trainers as entities are in
``one_vs_all``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dglkge.model.kge_model import KgeModel
from dglkge.step.contracts import Gradients, Objective, Rows
from dglkge.step.objectives.all_candidates import CandidateLoss, Piece, QueryMaker, TakeBack
from dglkge.step.planning import Places, Plan
from dglkge.typing import Side

RELATION_BLOCKS = {Side.TAIL: "relation~tail", Side.HEAD: "relation~head"}
"""Names of the blocks of relation prediction; '~' cannot be confused with an entity type of that name."""


def relation_pieces(
    model: KgeModel,
    keys: npt.NDArray[np.int64],
    times: npt.NDArray[np.int64],
    heads: Tensor,
    tails: Tensor,
    factors: npt.NDArray[np.float32],
) -> list[Piece]:
    """Return the queries (h, ?, t): one for each direction that has relation rows of its own.

    ``keys`` (B,) determine the answers of each query: the node id of the relation itself, where there is one;
    ``times`` (B,) as of :meth:`KgeModel.relation_query`.
    """
    forwards = model.relation_query(heads, tails, torch.from_numpy(times))
    # Without reciprocal rows both directions have the same scores: one query with twice the factor.
    if not model.reciprocal:
        return [Piece(RELATION_BLOCKS[Side.TAIL], forwards, keys, 2 * factors)]
    backwards = model.relation_query(tails, heads, torch.from_numpy(times))
    return [
        Piece(RELATION_BLOCKS[Side.TAIL], forwards, keys, factors),
        Piece(RELATION_BLOCKS[Side.HEAD], backwards, keys, factors),
    ]


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
        return rows.leaf(places) if self._is_staged else rows.found(places).copied().requires_grad_()


@dataclass
class WithRelations(Objective):
    """An objective of batches of edges, and relation prediction beside it, whose gradients are added; a
    collective.
    """

    objective: Objective
    relations: CandidateLoss

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
            own, others = (wait() for wait in waiting)
            return Gradients(own.loss + others.loss, [*own.candidates, *others.candidates], own.measures)

        return finish
