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
    settings = chosen_regularizer(settings_of("regularizer", of, values), checkpoint.meta.score_function)
    made = REGULARIZERS.get(settings.name)(settings, model.score_function.complex_valued)
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
        self._loss, self._one_negative = copy.copy(loss), copy.copy(loss)
        self._is_softmax = isinstance(loss, Softmax)
        adds = isinstance(loss.reduction, Sum)
        if adds:
            self._loss.reduction = _Weighted(count / len(ids))
        # The sum of powers of all is N / M times that of the candidates.
        self._shift = math.log(count / len(ids)) if self._is_softmax else 0.0
        self._one_negative.reduction = Sum()
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
        """Return what :meth:`negative_change` compares one negative of queries (B,) with."""
        # Softmax: the logarithm of the sum of all powers.
        return positive + self(positive, negative, ignored) if self._is_softmax else positive

    def negative_change(self, references: Tensor, scores: Tensor) -> Tensor:
        """Return by how much one negative more, of scores (B, E), changes losses, but for constants."""
        if self._is_softmax:
            return functional.softplus(scores - references[:, None])
        pairs = references[:, None].expand_as(scores).reshape(-1), scores.reshape(-1, 1)
        return self._share * self._one_negative(*pairs).view_as(scores)


MAX_STEPS = 25
"""Of L-BFGS; a dozen are usual."""
MEMORY, MAX_HALVINGS = 10, 12
TOLERANCE = 2e-5
"""Decrease that a step must promise, as a share of the loss."""
ROUNDING = 1e-6
"""Of a loss, a sum of numbers in float32."""
PROBE = 0.01
"""Length of a move that shows the curvature at the start."""

_Pair = tuple[Tensor, Tensor, Tensor]
"""Moves (E, D), changes of gradients, and 1 over their products (E, 1), or 0 where these are negative."""


def better_rows(start: Tensor, terms: Sequence[Term]) -> tuple[Tensor, Tensor]:
    """Return rows (E, D) with less loss by terms, and whether each (E,) is to be improved further.

    L-BFGS for all of them at once, in float64.
    """
    rows = start.double()
    losses, gradients = _evaluated(rows, terms)
    move = -PROBE * functional.normalize(gradients)
    pairs = deque([_pair(move, _evaluated(rows + move, terms)[1] - gradients)], MEMORY)
    fails = torch.zeros(len(rows), dtype=torch.bool)
    for number in range(MAX_STEPS + 1):
        directions = -_quasi_newton(gradients, pairs)
        slopes = (directions * gradients).sum(1)
        is_open = (-slopes > 2 * TOLERANCE * losses.abs()) & ~fails
        if number == MAX_STEPS or not is_open.any():
            break
        steps = is_open.double()
        for _ in range(MAX_HALVINGS):
            moved = rows + steps[:, None] * directions
            new_losses, new_gradients = _evaluated(moved, terms)
            # A loss that is NaN rises as well.
            rises = ~(new_losses <= losses + 1e-4 * steps * slopes + ROUNDING * losses.abs())
            if not rises.any():
                break
            steps = torch.where(rises, steps / 2, steps)
        # A row that no step betters stays where it was.
        fails, kept = fails | rises, rises[:, None]
        moved, new_gradients = torch.where(kept, rows, moved), torch.where(kept, gradients, new_gradients)
        pairs.append(_pair(moved - rows, new_gradients - gradients))
        rows, losses, gradients = moved, torch.where(rises, losses, new_losses), new_gradients
    return rows, is_open


def _evaluated(rows: Tensor, terms: Sequence[Term]) -> tuple[Tensor, Tensor]:
    """Return the losses (E,) and the gradients (E, D) of rows."""
    leaf = rows.detach().requires_grad_()
    losses = torch.stack([term(leaf) for term in terms]).sum(0)
    (gradients,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradients


def _pair(move: Tensor, change: Tensor) -> _Pair:
    curvature = (move * change).sum(1, keepdim=True)
    return move, change, torch.where(curvature > 1e-10, 1 / curvature, 0.0)


def _quasi_newton(gradients: Tensor, pairs: Sequence[_Pair]) -> Tensor:
    """Return gradients (E, D) times the inverse second derivatives that pairs show (Liu and Nocedal 1989)."""
    rest, shares = gradients, []
    for move, change, inverse in reversed(pairs):
        shares.append(inverse * (move * rest).sum(1, keepdim=True))
        rest = rest - shares[-1] * change
    move, change, inverse = pairs[-1]
    scale = 1 / (inverse * (change * change).sum(1, keepdim=True))
    made = rest * torch.where(inverse > 0, scale, 1.0)
    for (move, change, inverse), share in zip(pairs, reversed(shares)):
        made = made + (share - inverse * (change * made).sum(1, keepdim=True)) * move
    return made
