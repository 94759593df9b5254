"""Regularizers of rows, one number per row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from dglkge.model.options import checked_number
from dglkge.registry import Registry


class Regularizer(ABC):
    """A penalty on rows.

    Parameters
    ----------
    weight : float
        Factor on the penalty; at least 0.
    p : float
        The power, at least 1; N3 knows only 3.
    complex_valued : bool
        Whether rows are complex: first half real parts, second half imaginary parts.
    """

    def __init__(self, weight: float, p: float = 3.0, complex_valued: bool = False) -> None:
        self.weight = checked_number("the regularizer's weight", weight, 0)
        self.p = checked_number("the regularizer's p", p, 1)
        self.complex_valued = complex_valued

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return weight times the penalty of each row: (..., D) -> (...)."""
        return self.weight * self.penalty(rows)

    @abstractmethod
    def penalty(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the penalty of each row, summed over it: (..., D) -> (...)."""


REGULARIZERS: Registry[type[Regularizer]] = Registry("regularizer")


def build_regularizer(name: str, weight: float, p: float = 3.0, complex_valued: bool = False) -> Regularizer:
    """Build a regularizer by name.

    Raises
    ------
    InputError
        If nobody knows the name, the weight is negative or p is below 1.
    """
    return REGULARIZERS.get(name)(weight, p, complex_valued)


@REGULARIZERS.register("n3")
class N3(Regularizer):
    """Nuclear 3-norm, sum_k |x_k|^3 with complex moduli where rows are complex (Lacroix et al. 2018)."""

    def penalty(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the third powers of each row's moduli."""
        if not self.complex_valued:
            return rows.abs().pow(3).sum(-1)
        return _CubedModuli.apply(rows)


class _CubedModuli(torch.autograd.Function):
    """Sum of |z|^3 over complex rows; its gradient 3 |z| z is 0 at 0, where autograd's would be NaN."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        real, imaginary = rows.chunk(2, dim=-1)
        squares = real.square().addcmul_(imaginary, imaginary)
        moduli = squares.sqrt()
        ctx.save_for_backward(rows, moduli)
        return squares.mul_(moduli).sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        rows, moduli = ctx.saved_tensors
        factors = moduli * (3 * gradients[0]).unsqueeze(-1)
        return rows * torch.cat([factors, factors], dim=-1)


@REGULARIZERS.register("lp")
class Lp(Regularizer):
    """sum_k |x_k|^p over the numbers of a row, real and imaginary parts alike (as DGL-KE's)."""

    def penalty(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the p-th powers of each row's numbers."""
        return rows.abs().pow(self.p).sum(-1)
