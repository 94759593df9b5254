"""Loss and regularizer of a run, a loss over all entities of a type, and the row with the least loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
"""Takes a row (D,) and returns a part of its loss, a scalar."""


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

    def references(self, positive: Tensor, negative: Tensor, ignored: Tensor) -> Tensor:
        """Return what :meth:`of_negative` compares one negative of queries (B,) with."""
        # Softmax: the logarithm of the sum of all powers.
        return positive + self(positive, negative, ignored) if self._is_softmax else positive

    def of_negative(self, references: Tensor, scores: Tensor) -> Tensor:
        """Return by how much one negative more, with scores (B,), changes losses, but for constants."""
        return self._share * self._of_one(references, scores.unsqueeze(1))


MAX_STEPS = 200
"""Of L-BFGS; tens are usual."""
STRONG_WOLFE = "strong_wolfe"


def best_row(start: Tensor, terms: Sequence[Term]) -> Tensor:
    """Return the row (D,) float32 with the least sum of terms, by L-BFGS from a start (D,)."""
    row = start.double().requires_grad_()
    # A change of 1e-5 is below what float32 shows in a loss of hundreds.
    optimizer = torch.optim.LBFGS(
        [row], max_iter=MAX_STEPS, tolerance_grad=1e-4, tolerance_change=1e-5, line_search_fn=STRONG_WOLFE
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = torch.stack([term(row) for term in terms]).sum()
        total.backward()
        return total

    optimizer.step(loss)
    return row.detach().float()
