"""An objective over all candidates of a user, in a file of its own: tails only."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from dglkge.model.choices import OBJECTIVES, CandidateSettings, ObjectiveChoice
from dglkge.step.contracts import Rows
from dglkge.step.objectives.all_candidates import ModelQueries, Piece, TakeBack
from dglkge.step.planning import Plan
from dglkge.typing import Side


class TailQueries(ModelQueries):
    """(h, r, ?) of each triple."""

    def make(self, plan: Plan, rows: Rows) -> tuple[list[Piece], TakeBack]:
        """Return the queries, and what takes their gradients back to the rows."""
        pieces = []
        for group in plan.groups:
            heads, relations = rows.leaf(group.heads), rows.leaf(group.relations)
            query = self._model.query(heads, relations, Side.TAIL, torch.from_numpy(group.relation_ids))
            pieces.append(Piece(group.rhs, query, group.tail_ids, group.factors(plan.divisor)))
        return pieces, functools.partial(_take_back, [piece.queries for piece in pieces])


def _take_back(queries: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> float:
    """Write the gradients of the rows; there is no penalty."""
    if queries:
        torch.autograd.backward(list(queries), list(gradients))
    return 0.0


OBJECTIVES.register("tails")(ObjectiveChoice("tails against all entities", TailQueries, CandidateSettings))
