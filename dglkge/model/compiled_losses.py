"""Losses and their gradients in one pass over the scores, by compiled loops, instead of ten of autograd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dglkge.kernels.softmax import self_adversarial_rows, softmax_rows
from dglkge.model.functions.autograd import may_use_loops
from dglkge.model.losses import IGNORED_SCORE, Loss, SelfAdversarial, Softmax
from dglkge.model.negative_terms import Adversarial

LossFunction = Callable[..., torch.Tensor]
"""Takes what a :class:`Loss` takes, and returns the same."""


def with_loops(loss: Loss) -> LossFunction:
    """Return a function that computes a loss by compiled loops where there are some, else the loss itself.

    Scores that are not float32 on a CPU, and settings that the loops do not know, go to the loss.
    """
    # The exact type: a subclass may compute another loss.
    made = _LOOPS.get(type(loss))
    return loss if made is None else made(loss)


def _softmax(loss: Any) -> LossFunction:
    """Return :class:`Softmax` by loops."""

    def compute(
        positive: torch.Tensor, negative: torch.Tensor, ignored: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Return the loss of each query."""
        if isinstance(loss.reduction, Adversarial) or not _has_loops(negative):
            plain: torch.Tensor = loss(positive, negative, ignored)
            return plain
        return _SoftmaxRows.apply(positive, negative, ignored)

    return compute


def _self_adversarial(loss: Any) -> LossFunction:
    """Return :class:`SelfAdversarial` by loops."""

    def compute(
        positive: torch.Tensor,
        negative: torch.Tensor,
        ignored: Optional[torch.Tensor] = None,
        labels: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Return the loss of each query."""
        if labels is not None or not _has_loops(negative):
            plain: torch.Tensor = loss(positive, negative, ignored, labels)
            return plain
        of_negatives = _SelfAdversarialRows.apply(
            negative, ignored, loss.settings.margin, loss.settings.adversarial_temperature
        )
        return functional.softplus(-positive - loss.settings.margin) + of_negatives

    return compute


_LOOPS: Mapping[type[Loss], Callable[[Any], LossFunction]] = {
    Softmax: _softmax,
    SelfAdversarial: _self_adversarial,
}


def _has_loops(scores: torch.Tensor) -> bool:
    """Return whether the loops take these scores."""
    return may_use_loops() and scores.device.type == "cpu" and scores.dtype == torch.float32


def _scores(negative: torch.Tensor, ignored: Optional[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and the mask of those that do not count as arrays."""
    mask = torch.zeros(negative.shape, dtype=torch.bool) if ignored is None else ignored
    return negative.detach().contiguous().numpy(), mask.contiguous().numpy()


class _SoftmaxRows(torch.autograd.Function):
    """Softmax of each query; the forward pass computes the gradients too."""

    @staticmethod
    def forward(
        ctx: Any, positive: torch.Tensor, negative: torch.Tensor, ignored: Optional[torch.Tensor]
    ) -> torch.Tensor:
        """Return the losses (B,)."""
        scores, mask = _scores(negative, ignored)
        gradients = torch.empty(negative.shape)
        missing, losses = torch.empty(len(negative)), torch.empty(len(negative))
        outputs = gradients.numpy(), missing.numpy(), losses.numpy()
        truth = positive.detach().contiguous().numpy()
        softmax_rows(scores, mask, np.float32(IGNORED_SCORE), truth, *outputs)
        ctx.save_for_backward(gradients, missing)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of the scores."""
        gradients, missing = ctx.saved_tensors
        return missing * grads[0], gradients * grads[0].unsqueeze(1), None


class _SelfAdversarialRows(torch.autograd.Function):
    """The part of the negatives in :class:`SelfAdversarial`; the forward pass computes the gradients too."""

    @staticmethod
    def forward(
        ctx: Any,
        negative: torch.Tensor,
        ignored: Optional[torch.Tensor],
        margin: float,
        temperature: float,
    ) -> torch.Tensor:
        """Return the losses (B,)."""
        scores, mask = _scores(negative, ignored)
        gradients, losses = torch.empty(negative.shape), torch.empty(len(negative))
        options = np.float32(IGNORED_SCORE), np.float32(margin), np.float32(temperature)
        self_adversarial_rows(scores, mask, *options, gradients.numpy(), losses.numpy())
        ctx.save_for_backward(gradients)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of the scores."""
        (gradients,) = ctx.saved_tensors
        return gradients * grads[0].unsqueeze(1), None, None, None
