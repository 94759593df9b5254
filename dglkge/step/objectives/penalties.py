"""Penalties of groups of edges beside gradients that are written by compiled loops."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch

from dglkge.kernels import penalties as kernels
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


class GroupPenalty:
    """Adds the gradients of the queries' penalties to those of a group's rows.

    Parameters
    ----------
    model : KgeModel
    regularizer : Regularizer or None
    sides : collection of Side
        Sides whose queries are regularized; the loops compute both.

    Attributes
    ----------
    n3 : np.float32
        Weight of N3 in the loop that writes the gradients (``kernels.dot.write_gradients``), where the
        regularizer is just that; :meth:`add` then adds nothing.
    """

    def __init__(
        self, model: KgeModel, regularizer: Regularizer | None, sides: Collection[Side] = tuple(Side)
    ) -> None:
        self._model = model
        self._regularizer = regularizer
        self._operator = (model.score_function.complex_valued, model.reciprocal)
        self._sides = sides
        self._weights = weights = loop_weights(model, regularizer) if len(sides) == len(Side) else None
        self.n3 = np.float32(0)
        if weights is not None and weights.power == 3 and weights.entity == 2 * weights.relation:
            self.n3, self._regularizer = np.float32(weights.relation), None

    def add(self, group: Group, rows: Rows, factors: npt.NDArray[np.float32]) -> float:
        """Add the gradients, each triple's times its factor (B,); returns the summed penalty."""
        if self._regularizer is None:
            return 0.0
        if self._weights is None:
            return self._by_autograd(self._regularizer, group, rows, factors)
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
            self._model.penalty(regularizer, anchors, relations, truths, side)
            for side, (anchors, truths) in entities.items()
            if side in self._sides
        ]
        total = (sum(of_sides[1:], of_sides[0]) * torch.from_numpy(factors)).sum()
        total.backward()
        for place, leaf in zip(places, leaves):
            if leaf.grad is not None:
                rows.gradients(place).add_(leaf.grad)
        return total.item()
