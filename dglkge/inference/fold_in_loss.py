"""Loss and regularizer of a run, a loss over all entities of a type, and the rows with the least losses."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dglkge.checkpoint.reader import Checkpoint
from dglkge.config.schema import value_at
from dglkge.model.choices import NEGATIVE_SAMPLING
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import Loss, Softmax, build_loss
from dglkge.model.negative_terms import Mean, Sum
from dglkge.model.regularizers import AUTO, REGULARIZERS, VALUES, Regularizer, chosen_regularizer
from dglkge.settings import settings_of


def run_loss(checkpoint: Checkpoint) -> Loss:
    """Return the loss that a run was trained with; objectives over all candidates add the terms of these."""
    loss = build_loss(**value_at(checkpoint.config, ("loss",), {"name": "softmax"}))
    objective = value_at(checkpoint.config, ("training", "objective", "name"), NEGATIVE_SAMPLING)
    if objective != NEGATIVE_SAMPLING and isinstance(loss.reduction, Mean):
        loss.reduction = Sum()
    return loss


def run_regularizer(checkpoint: Checkpoint, model: KgeModel) -> Regularizer | None:
    """Return the regularizer that a run was trained with; None if it has no effect."""
    values: dict[str, Any] = dict(value_at(checkpoint.config, ("regularizer",), {"name": AUTO}))
    of = VALUES.get(values["name"]) or REGULARIZERS.get(values["name"]).Settings
    chosen = chosen_regularizer(settings_of("regularizer", of, values), checkpoint.meta.score_function)
    made = REGULARIZERS.get(chosen.name)(chosen, model.score_function.complex_valued)
    return made if made.weight else None


Term = Callable[[Tensor], Tensor]
"""Takes rows (E, D) float64 and returns a part of the loss (E,) of each."""


class _Weighted(Sum):
    """Sum over the negatives, times a factor."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, terms: Tensor, negative: Tensor, ignored: Tensor | None) -> Tensor:
        return self._factor * terms.sum(1)


class CandidateLoss:
    """A loss over all N entities of a type, M of which are candidates.

    Parameters
    ----------
    count : int
        N.
    ids, rows : (M,) int64 tensor and (M, D) float32 tensor
    """

    def __init__(self, loss: Loss, count: int, ids: Tensor, rows: Tensor) -> None:
        self.ids, self.rows = ids, rows
        self._loss, self._of_one = copy.copy(loss), copy.copy(loss)
        self._is_softmax = isinstance(loss, Softmax)
        adds = isinstance(loss.reduction, Sum)
        if adds:
            self._loss.reduction = _Weighted(count / len(ids))
        # The sum of powers of all is N / M times that of the candidates.
        self._shift = math.log(count / len(ids)) if self._is_softmax else 0.0
        self._of_one.reduction = Sum()
        self._share = 1.0 if self._is_softmax or adds else 1 / count

    def __call__(self, positive: Tensor, negative: Tensor, ignored: Tensor) -> Tensor:
        """Return the loss (B,) of answers (B,) against candidates (B, M)."""
        return self._loss(positive - self._shift, negative, ignored)

    def against(self, negative: Tensor, ignored: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the loss (B,) as a function of the scores (B,) of the answers, those of candidates fixed."""
        if not self._is_softmax:
            return lambda positive: self(positive, negative, ignored)
        # Softmax: one number stands for the scores of all.
        powers = negative.masked_fill(ignored, -math.inf).logsumexp(1) + self._shift
        return lambda positive: functional.softplus(powers - positive)

    def references(self, positive: Tensor, negative: Tensor, ignored: Tensor) -> Tensor:
        """Return what :meth:`of_negative` compares one negative of queries (B,) with."""
        # Softmax: the logarithm of the sum of all powers.
        return positive + self(positive, negative, ignored) if self._is_softmax else positive

    def of_negative(self, references: Tensor, scores: Tensor) -> Tensor:
        """Return by how much one negative more, of scores (B, E), changes losses, but for constants."""
        if self._is_softmax:
            return functional.softplus(scores - references[:, None])
        pairs = references[:, None].expand_as(scores).reshape(-1), scores.reshape(-1, 1)
        return self._share * self._of_one(*pairs).view_as(scores)


MAX_STEPS = 100
"""Of L-BFGS; a dozen are usual."""
MEMORY = 10
MAX_HALVINGS = 12
TOLERANCE = 1e-4
"""Decrease of a loss that a step must promise."""
STEP = 0.01
"""Of differences of gradients."""
ROUNDING = 1e-6
"""Of a loss, a sum of numbers in float32."""


def best_rows(start: Tensor, terms: Sequence[Term], metric: Tensor) -> Tensor:
    """Return rows (E, D) float32 with the least sums of terms, by L-BFGS for all of them at once.

    `metric` (D, D) is the inverse of a matrix near the second derivatives of each.
    """
    rows, (losses, gradients) = start.double(), _evaluated(start.double(), terms)
    pairs: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=MEMORY)
    fails = torch.zeros(len(rows), dtype=torch.bool)
    for _ in range(MAX_STEPS):
        directions = -_quasi_newton(gradients, pairs, metric)
        slopes = (directions * gradients).sum(1)
        is_open = (-slopes > 2 * TOLERANCE) & ~fails
        if not is_open.any():
            break
        steps = is_open.double()
        for _ in range(MAX_HALVINGS):
            moved = rows + steps[:, None] * directions
            new_losses, new_gradients = _evaluated(moved, terms)
            rises = new_losses > losses + 1e-4 * steps * slopes + ROUNDING * losses.abs()
            if not rises.any():
                break
            steps = torch.where(rises, steps / 2, steps)
        fails = fails | rises
        move, change = moved - rows, new_gradients - gradients
        curvature = (move * change).sum(1)
        # No pair where a row stays, or the loss is not convex.
        inverse = torch.where(curvature > 1e-10, 1 / curvature, 0.0)
        pairs.append((move, change, inverse[:, None]))
        rows, losses, gradients = moved, new_losses, new_gradients
    return rows.float()


def inverse_curvature(points: Tensor, terms: Sequence[Term]) -> Tensor:
    """Return the inverse second derivatives (D, D) of terms, a direction at each of the points (D, D)."""
    moves = STEP * torch.eye(points.shape[1], dtype=torch.float64)
    before, after = (_evaluated(points.double() + sign * moves, terms)[1] for sign in (-0.5, 0.5))
    found = (after - before) / STEP
    values, vectors = torch.linalg.eigh((found + found.T) / 2)
    # Not below a hundredth of their mean: terms may have no curvature in some direction, or a negative one.
    least = max(0.01 * float(values.abs().mean()), 1e-6)
    return (vectors / values.clamp_min(least)) @ vectors.T


def _evaluated(rows: Tensor, terms: Sequence[Term]) -> tuple[Tensor, Tensor]:
    """Return the losses (E,) and the gradients (E, D) of rows."""
    leaf = rows.detach().requires_grad_()
    losses = torch.stack([term(leaf) for term in terms]).sum(0)
    (gradients,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradients


def _quasi_newton(
    gradients: Tensor, pairs: Sequence[tuple[Tensor, Tensor, Tensor]], metric: Tensor
) -> Tensor:
    """Return gradients (E, D) times the inverse second derivatives, as moves and their changes show them."""
    left, shares = gradients, []
    for move, change, inverse in reversed(pairs):
        shares.append(inverse * (move * left).sum(1, keepdim=True))
        left = left - shares[-1] * change
    made = left @ metric
    for (move, change, inverse), share in zip(pairs, reversed(shares)):
        made = made + (share - inverse * (change * made).sum(1, keepdim=True)) * move
    return made
