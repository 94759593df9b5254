"""Entries of ``param_groups`` for embeddings, and support of torch.amp.GradScaler.

A scaler passes the gradients of all tensors in ``param_groups`` to one function of torch, which divides them
by the scale and sets a flag if one is not finite. The gradients of an embedding are as many tensors as there
were reads. So an embedding is represented by an empty tensor; the first one of an optimizer has a gradient,
empty too, which overrides that function through ``__torch_function__``: it unscales the gradients of all
reads, and sums the flag over the trainers. All of them then skip the step and lower the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch

#: Method that multiplies the gradients by a number; returns whether one of any trainer is not finite.
Unscale = Callable[[torch.Tensor], bool]

_UNSCALE_OF_TORCH = "_amp_foreach_non_finite_check_and_unscale_"


class EmbeddingParameter(torch.Tensor):
    """Entry of ``param_groups`` for an embedding: an empty tensor with a reference to it.

    Attributes
    ----------
    embedding : dgl.distributed.DistEmbedding
        The embedding.
    """

    embedding: Any
    _scaled: ScaledGradients | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, embedding: Any, unscale: WeakMethod[Unscale] | None) -> EmbeddingParameter:
        """Make the entry of an embedding.

        Parameters
        ----------
        embedding : dgl.distributed.DistEmbedding
            The embedding.
        unscale : weakref.WeakMethod, optional
            Unscales the gradients of all embeddings of the optimizer: for its first embedding only. Weak, so
            that the optimizer is not part of a reference cycle.
        """
        parameter = torch.empty(0).as_subclass(cls)
        parameter.embedding = embedding
        parameter._scaled = None if unscale is None else ScaledGradients.of(unscale)
        return parameter

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """Gradient as the scaler reads it."""
        return self._scaled

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"EmbeddingParameter({self.embedding.name!r})"


class ScaledGradients(torch.Tensor):
    """Empty gradient that represents those of all reads."""

    _unscale: WeakMethod[Unscale]

    @classmethod
    def of(cls, unscale: WeakMethod[Unscale]) -> ScaledGradients:
        """Make the gradient that calls a method when it is unscaled."""
        gradients = torch.empty(0).as_subclass(cls)
        gradients._unscale = unscale
        return gradients

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") != _UNSCALE_OF_TORCH:
            return super().__torch_function__(function, types, args, kwargs or {})
        gradients, found_inf, inverse_scale = args
        for each in gradients:
            unscale = each._unscale()
            if unscale is not None and unscale(inverse_scale):
                found_inf.fill_(1.0)
        return None
