"""Queries of a group that are compared by inner products, and the gradients of their rows.

Between the two, :class:`DotSoftmax` takes three matmuls and the loop of the loss. DistMult and ComplEx have
compiled loops for both; every other product of an entity and its relation (Keci, SimplE, QuatE, a
user's) is differentiated by torch, which costs B·D numbers and not B·N.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from dglkge.kernels import dot
from dglkge.model.functions.autograd import words
from dglkge.model.kge_model import KgeModel
from dglkge.model.regularizers import Regularizer
from dglkge.step.contracts import Rows
from dglkge.step.objectives.penalties import GroupPenalty
from dglkge.step.planning import Group
from dglkge.typing import Side


class GroupQueries(Protocol):
    """Queries of both sides of a group of B edges, those for tails first."""

    def write(self, queries: torch.Tensor, positive: np.ndarray, own: np.ndarray) -> None:
        """Write the queries (2 B, D), and the scores (2 B,) of their true answers and own entities."""
        ...

    def differentiate(
        self, of_queries: torch.Tensor, missing: np.ndarray, own_shares: np.ndarray, factors: np.ndarray
    ) -> float:
        """Write the gradients of the group's rows; returns the summed penalty.

        Parameters
        ----------
        of_queries : (2 B, D) tensor
            Contribution of the negatives to the gradients of the queries.
        missing, own_shares : (2 B,) float32
            Gradients of the scores of the true answers and of the own entities.
        factors : (B,) float32
            Factor of each edge's penalty.
        """
        ...


def side_runs(num: int) -> dict[Side, slice]:
    """Return the run of the queries of each side, those for tails first."""
    return {Side.TAIL: slice(0, num), Side.HEAD: slice(num, 2 * num)}


class CompiledQueries(GroupQueries):
    """Queries of DistMult and ComplEx by ``kernels.dot``; rows are read where they lie."""

    def __init__(self, model: KgeModel, penalty: GroupPenalty, group: Group, rows: Rows) -> None:
        self._operator = (model.score_function.complex_valued, model.reciprocal)
        self._penalty, self._group, self._rows = penalty, group, rows
        self._places = (group.heads, group.tails, group.relations)
        # Kept until the loops have read the addresses.
        self._found = [rows.found(places) for places in self._places]

    def write(self, queries: torch.Tensor, positive: np.ndarray, own: np.ndarray) -> None:
        rows = tuple(found.addresses for found in self._found)
        dot.make_queries(rows, self._operator, words(queries), positive, own)

    def differentiate(
        self, of_queries: torch.Tensor, missing: np.ndarray, own_shares: np.ndarray, factors: np.ndarray
    ) -> float:
        penalty: float = dot.write_gradients(
            tuple(found.addresses for found in self._found),
            self._operator,
            words(of_queries),
            (missing, own_shares),
            factors,
            self._penalty.n3,
            tuple(self._rows.gradients(places).numpy() for places in self._places),
        )
        return penalty + self._penalty.add(self._group, self._rows, factors)


class DifferentiatedQueries(GroupQueries):
    """Queries of any model that compares by inner products, differentiated by torch."""

    def __init__(self, model: KgeModel, regularizer: Regularizer | None, group: Group, rows: Rows) -> None:
        self._model, self._regularizer, self._group = model, regularizer, group
        self._places = (group.heads, group.relations, group.tails)
        self._rows = rows
        self._leaves = [rows.found(places).copied().requires_grad_() for places in self._places]
        self._outputs: dict[Side, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._penalties: list[torch.Tensor] = []

    def write(self, queries: torch.Tensor, positive: np.ndarray, own: np.ndarray) -> None:
        # What a side without negatives holds is multiplied by 0.
        queries.zero_()
        positive[:] = own[:] = 0
        group, model = self._group, self._model
        heads, relations, tails = self._leaves
        for side, run in side_runs(len(group)).items():
            if side not in group.negatives:
                continue
            anchors, truths = (heads, tails) if side is Side.TAIL else (tails, heads)
            query = model.query(anchors, relations, side)
            of_truth, of_own = model.compare_pairs(query, truths), model.compare_pairs(query, anchors)
            self._outputs[side] = (query, of_truth, of_own)
            queries[run] = query.detach()
            positive[run], own[run] = of_truth.detach().numpy(), of_own.detach().numpy()
            if self._regularizer is not None:
                penalty = self._regularizer.of_query(query, truths)
                if penalty is None:
                    penalty = model.penalty(self._regularizer, anchors, relations, truths, side)
                self._penalties.append(penalty)

    def differentiate(
        self, of_queries: torch.Tensor, missing: np.ndarray, own_shares: np.ndarray, factors: np.ndarray
    ) -> float:
        runs = side_runs(len(self._group))
        outputs = [each for of_side in self._outputs.values() for each in of_side] + self._penalties
        slopes = [
            each
            for side in self._outputs
            for each in (
                of_queries[runs[side]].float(),
                torch.from_numpy(missing[runs[side]]),
                torch.from_numpy(own_shares[runs[side]]),
            )
        ]
        slopes += [torch.from_numpy(factors)] * len(self._penalties)
        found = torch.autograd.grad(outputs, self._leaves, slopes)
        for places, gradients in zip(self._places, found):
            self._rows.gradients(places).copy_(gradients)
        return float(
            sum(
                float(penalty.detach().double() @ torch.from_numpy(factors).double())
                for penalty in self._penalties
            )
        )
