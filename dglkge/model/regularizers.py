"""Regularizers of rows, one number per row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from dglkge.model.options import checked_number
from dglkge.registry import Registry, deferred

if TYPE_CHECKING:
    import torch

    from dglkge.model import autograd_functions
else:
    autograd_functions = deferred("dglkge.model.autograd_functions")


class Regularizer(ABC):
    """A penalty on rows.

    Parameters
    ----------
    weight : float
        Factor on the penalty; at least 0.
    p : float
        The power, at least 1; N3's is always 3.
    complex_valued : bool
        Whether rows are complex: first half real parts, second half imaginary parts.

    Attributes
    ----------
    help : str
        One line for the configuration's help.
    compiled : bool
        Whether the compiled training step (``training/dot_softmax.py``) computes exactly this penalty and
        its gradient. A subclass may compute another one, so it does not inherit the fact.
    takes_weight : bool
        Whether a weight makes a difference.
    """

    help: ClassVar[str] = ""
    compiled: ClassVar[bool] = False
    takes_weight: ClassVar[bool] = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.compiled = cls.__dict__.get("compiled", False)

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
        If the name is not registered, the weight is negative or p is below 1.
    """
    return REGULARIZERS.get(name)(weight, p, complex_valued)


@REGULARIZERS.register("none")
class NoRegularizer(Regularizer):
    """No penalty; a weight is refused by the check of the configuration."""

    help = "no regularizer"
    takes_weight = False

    def penalty(self, rows: torch.Tensor) -> torch.Tensor:
        """Return 0 for each row."""
        # A multiple of the rows: the result has their device and dtype, and a gradient (of 0) for autograd.
        return 0 * rows.sum(-1)


@REGULARIZERS.register("n3")
class N3(Regularizer):
    """Nuclear 3-norm, sum_k |x_k|^3 with complex moduli where rows are complex (Lacroix et al. 2018)."""

    help = "sum of |x|^3, complex moduli where rows are complex (Lacroix et al. 2018)"
    compiled = True

    def penalty(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the third powers of each row's moduli."""
        if not self.complex_valued:
            # Real rows: autograd's derivative of |x|^3 is finite at 0.
            return rows.abs().pow(3).sum(-1)
        # Complex rows: autograd through the square root of a modulus is NaN at 0.
        return autograd_functions.CubedModuli.apply(rows)


@REGULARIZERS.register("lp")
class Lp(Regularizer):
    """sum_k |x_k|^p over the numbers of a row, real and imaginary parts alike (as DGL-KE's)."""

    help = "sum of |x|^p over all numbers (as DGL-KE's)"

    def penalty(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the p-th powers of each row's numbers."""
        return rows.abs().pow(self.p).sum(-1)
