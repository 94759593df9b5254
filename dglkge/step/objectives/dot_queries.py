"""Queries of a group that are compared by inner products, and the gradients of their rows.

Between the two, :class:`DotSoftmax` takes three matmuls and the loop of the loss. DistMult and ComplEx have
compiled loops for both; every other product of an entity and its relation (Keci, SimplE, QuatE, a
user's) is differentiated by torch, which costs B·D numbers and not B·N.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dglkge.kernels import dot
from dglkge.kernels import penalties as kernels
from dglkge.model.functions.autograd import words
from dglkge.model.kge_model import KgeModel
from dglkge.model.regularizers import LoopWeights, Regularizer
from dglkge.step.contracts import Rows
from dglkge.step.planning import Group
from dglkge.typing import Side


def loop_weights(model: KgeModel, regularizer: Regularizer | None) -> LoopWeights | None:
    """Return the weights with which compiled loops compute a model's regularizer; None if they do not."""
    if regularizer is None or not regularizer.compiled:
        return None
    if regularizer.complex_valued != model.score_function.complex_valued:
        return None
    return regularizer.loop_weights


@dataclass
class GroupPenalty:
    """Adds the gradients of the queries' penalties to those of a group's rows.

    Attributes
    ----------
    model : KgeModel
    regularizer : Regularizer or None
    sides : collection of Side
        Sides whose queries are regularized; the loops compute both.

    n3 : np.float32
        Weight of N3 in the loop that writes the gradients (``kernels.dot.write_gradients``), where the
        regularizer is just that; :meth:`add` then adds nothing.
    """

    model: KgeModel
    regularizer: Regularizer | None
    sides: Collection[Side] = tuple(Side)

    def __post_init__(self) -> None:
        self._operator = (self.model.score_function.complex_valued, self.model.reciprocal)
        self._weights = weights = (
            loop_weights(self.model, self.regularizer) if len(self.sides) == len(Side) else None
        )
        self.n3 = np.float32(0)
        if weights is not None and weights.power == 3 and weights.entity == 2 * weights.relation:
            self.n3, self.regularizer = np.float32(weights.relation), None

    def add(self, group: Group, rows: Rows, factors: npt.NDArray[np.float32]) -> float:
        """Add the gradients, each triple's times its factor (B,); returns the summed penalty."""
        if self.regularizer is None:
            return 0.0
        if self._weights is None:
            return self._by_autograd(self.regularizer, group, rows, factors)
        places = (group.heads, group.tails, group.relations)
        # Kept until the loop has read the addresses.
        found = [rows.found(one) for one in places]
        weights = tuple(np.float32(weight) for weight in self._weights[1:])
        penalty: float = kernels.add_penalties(
            tuple(one.addresses for one in found),
            self._operator,
            factors,
            self._weights.power,
            weights,
            tuple(rows.gradients(one).numpy() for one in places),
        )
        return penalty

    def _by_autograd(
        self, regularizer: Regularizer, group: Group, rows: Rows, factors: npt.NDArray[np.float32]
    ) -> float:
        """Add the gradients of a regularizer that has no loop."""
        places = (group.heads, group.relations, group.tails)
        leaves = [rows.found(one).copied().requires_grad_() for one in places]
        heads, relations, tails = leaves
        entities = {Side.TAIL: (heads, tails), Side.HEAD: (tails, heads)}
        of_sides = [
            regularizer.penalties(self.model, anchors, relations, truths, side)
            for side, (anchors, truths) in entities.items()
            if side in self.sides
        ]
        total = (sum(of_sides[1:], of_sides[0]) * torch.from_numpy(factors)).sum()
        total.backward()
        for place, leaf in zip(places, leaves):
            if leaf.grad is not None:
                rows.gradients(place).add_(leaf.grad)
        return total.item()


class GroupQueries(Protocol):
    """Queries of both sides of a group of B edges, those for tails first."""

    def write(self, queries: Tensor, positive: np.ndarray, own: np.ndarray) -> None:
        """Write the queries (2 B, D), and the scores (2 B,) of their true answers and own entities."""

    def differentiate(
        self, of_queries: Tensor, missing: np.ndarray, own_shares: np.ndarray, factors: np.ndarray
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

    def write(self, queries: Tensor, positive: np.ndarray, own: np.ndarray) -> None:
        rows = tuple(found.addresses for found in self._found)
        dot.make_queries(rows, self._operator, words(queries), positive, own)

    def differentiate(
        self, of_queries: Tensor, missing: np.ndarray, own_shares: np.ndarray, factors: np.ndarray
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
        self._outputs: dict[Side, tuple[Tensor, Tensor, Tensor]] = {}
        self._penalties: list[Tensor] = []

    def write(self, queries: Tensor, positive: np.ndarray, own: np.ndarray) -> None:
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
                penalty = self._regularizer.penalties(model, anchors, relations, truths, side, query)
                self._penalties.append(penalty)

    def differentiate(
        self, of_queries: Tensor, missing: np.ndarray, own_shares: np.ndarray, factors: np.ndarray
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
