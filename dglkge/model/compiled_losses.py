"""Losses and their gradients in one pass over the scores, by compiled loops, instead of ten of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dglkge.model.functions.autograd import may_use_loops
from dglkge.model.losses import Loss
from dglkge.model.negative_terms import IGNORED_SCORE

LossFunction = Callable[..., Tensor]
"""Takes what a :class:`Loss` takes, and returns the same."""


def with_loops(loss: Loss) -> LossFunction:
    """Return a function that computes a loss by its compiled loop where it has one, else the loss itself.

    Scores that are not float32 on a CPU go to the loss.
    """
    if not loss.compiled:
        return loss
    loop = loss.loop()

    def compute(
        positive: Tensor, negative: Tensor, ignored: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Return the loss of each query."""
        if may_use_loops() and negative.device.type == "cpu" and negative.dtype == torch.float32:
            return _ByLoop.apply(positive, negative, ignored, labels, loop)
        call: Any = loss
        plain: Tensor = call(positive, negative, ignored, *([] if labels is None else [labels]))
        return plain

    return compute


class _ByLoop(torch.autograd.Function):
    """Loss of each query; the forward pass computes the gradients too."""

    @staticmethod
    def forward(
        ctx: Any,
        positive: Tensor,
        negative: Tensor,
        ignored: Tensor | None,
        labels: Tensor | None,
        loop: Callable[..., float],
    ) -> Tensor:
        gradients = negative.detach().clone(memory_format=torch.contiguous_format)
        if ignored is not None:
            gradients.masked_fill_(ignored, IGNORED_SCORE)
        num = len(negative)
        queries = torch.ones(7, num)
        queries[0], queries[1] = positive.detach(), IGNORED_SCORE
        if labels is not None:
            queries[5] = labels
        loop(gradients.numpy(), tuple(queries.numpy()))
        ctx.save_for_backward(gradients, queries[3].clone())
        return queries[6].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gradients, missing = ctx.saved_tensors
        return missing * grads[0], gradients * grads[0].unsqueeze(1), None, None, None
