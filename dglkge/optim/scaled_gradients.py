"""Parameter groups as torch.amp.GradScaler reads them.

A scaler goes through the tensors in ``param_groups``, and hands their gradients to one function of torch that
divides them by the scale and says whether one is not finite. The gradients of an embedding are those of the
rows that were read, as many tensors as there were reads. So each embedding is represented by a tensor, the
first of which has a gradient that stands for all of them: it replaces that function by one that treats the
gradients of all reads, and agrees with the other trainers on whether one is not finite. All of them then
leave out the step, and all of them lower the scale.
"""

from __future__ import annotations

from typing import Any, Callable
from weakref import WeakMethod

import torch

#: A method that takes the inverse of the scale, and says whether a gradient of any trainer is not finite.
Unscale = Callable[[torch.Tensor], bool]

_UNSCALE_OF_TORCH = "_amp_foreach_non_finite_check_and_unscale_"


class EmbeddingParameter(torch.Tensor):
    """Entry of ``param_groups`` for an embedding: an empty tensor that knows it.

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
        """Represent an embedding.

        Parameters
        ----------
        embedding : dgl.distributed.DistEmbedding
            The embedding.
        unscale : weakref.WeakMethod, optional
            Treats the gradients of all embeddings of the optimizer: for the first of them only. Held weakly,
            so that an optimizer that nobody uses any more goes at once.
        """
        parameter = torch.empty(0).as_subclass(cls)
        parameter.embedding = embedding
        parameter._scaled = None if unscale is None else ScaledGradients.of(unscale)
        return parameter

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """What a scaler takes for the gradient."""
        return self._scaled

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"EmbeddingParameter({self.embedding.name!r})"


class ScaledGradients(torch.Tensor):
    """A gradient without numbers that stands for those of all reads."""

    _unscale: WeakMethod[Unscale]

    @classmethod
    def of(cls, unscale: WeakMethod[Unscale]) -> ScaledGradients:
        """Stand for the gradients that a function treats."""
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
