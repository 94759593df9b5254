"""PyTorch-BigGraph's operators: how a relation acts on an entity's row.

Names, shapes, first values and formulas are those of its documentation ("Scoring", operators) and of its
checkpoints. A relation's row holds the operator's parameters one after the other. :mod:`.bigraph_scores`
combines each operator with each comparator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from dglkge.model.functions import Tensor, torch
from dglkge.model.functions.comparators import complex_product

Shapes = tuple[tuple[int, ...], ...]


class BigraphOperator:
    """x -> A x + b, with A and b of the relation; stateless. This class is ``none``: x -> x.

    Attributes
    ----------
    name : str
        PyTorch-BigGraph's.
    complex_valued : bool
        Whether rows are complex: first half real parts, second half imaginary parts.
    has_offset : bool
        Whether there is a b.
    cancels : bool
        Whether a number of the result is a sum, so that its relative rounding error has no bound.
    """

    name: ClassVar[str] = "none"
    complex_valued: ClassVar[bool] = False
    has_offset: ClassVar[bool] = False
    cancels: ClassVar[bool] = False
    dim_multiple: ClassVar[int] = 1

    def shapes(self, dim: int) -> Shapes:
        """Return the shape of each parameter for rows of width dim."""
        return ()

    def row_dim(self, dim: int) -> int:
        """Return the width of a relation's row.

        A table has no rows of width 0, so ``none`` has one number, which is not used and stays 0.
        """
        return max(1, sum(map(math.prod, self.shapes(dim))))

    def identity(self, dim: int) -> Tensor:
        """Return the row (Dr,) of the operator x -> x, with which PyTorch-BigGraph starts."""
        return torch.zeros(1)

    def apply(self, entity: Tensor, row: Tensor) -> Tensor:
        """Return A x + b: (..., D), (..., Dr) -> (..., D)."""
        # Expanded, as the other operators do, where the rows have more leading dimensions.
        return entity.expand(*torch.broadcast_shapes(entity.shape[:-1], row.shape[:-1]), -1)

    def transposed(self, entity: Tensor, row: Tensor) -> Tensor:
        """Return A' x, with A' the transpose: <x, A y> = <A' x, y>."""
        return self.apply(entity, row)

    def offset(self, row: Tensor, dim: int) -> Tensor:
        """Return b, (..., D); 0 for an operator that has none."""
        return row.new_zeros(*row.shape[:-1], dim)

    def gain(self, row: Tensor, dim: int) -> Tensor:
        """Return a bound (...) of |A| in |A x| <= |A| |x|."""
        return torch.ones_like(row[..., 0])


class TranslationOperator(BigraphOperator):
    """x + b (Bordes et al. 2013)."""

    name = "translation"
    has_offset = True

    def shapes(self, dim: int) -> Shapes:
        return ((dim,),)

    def identity(self, dim: int) -> Tensor:
        return torch.zeros(dim)

    def apply(self, entity: Tensor, row: Tensor) -> Tensor:
        return entity + row

    def transposed(self, entity: Tensor, row: Tensor) -> Tensor:
        return super().apply(entity, row)

    def offset(self, row: Tensor, dim: int) -> Tensor:
        return row


class DiagonalOperator(BigraphOperator):
    """Element-wise product d x (Yang et al. 2015)."""

    name = "diagonal"

    def shapes(self, dim: int) -> Shapes:
        return ((dim,),)

    def identity(self, dim: int) -> Tensor:
        return torch.ones(dim)

    def apply(self, entity: Tensor, row: Tensor) -> Tensor:
        return entity * row

    def gain(self, row: Tensor, dim: int) -> Tensor:
        return row.abs().amax(-1)


class LinearOperator(BigraphOperator):
    """Product with a matrix, W x (Nickel et al. 2011); the row holds W by rows."""

    name = "linear"
    cancels = True

    def shapes(self, dim: int) -> Shapes:
        return ((dim, dim),)

    def identity(self, dim: int) -> Tensor:
        return torch.eye(dim).reshape(-1)

    def apply(self, entity: Tensor, row: Tensor) -> Tensor:
        # einsum and not matmul: leading dimensions of 1 broadcast without copies of the matrices.
        return torch.einsum("...ij,...j->...i", self._matrix(row, entity.shape[-1]), entity)

    def transposed(self, entity: Tensor, row: Tensor) -> Tensor:
        return torch.einsum("...ji,...j->...i", self._matrix(row, entity.shape[-1]), entity)

    def gain(self, row: Tensor, dim: int) -> Tensor:
        """Return the Frobenius norm of W, which is at least its spectral norm."""
        return row[..., : dim * dim].norm(dim=-1)

    @staticmethod
    def _matrix(row: Tensor, dim: int) -> Tensor:
        return row[..., : dim * dim].unflatten(-1, (dim, dim))


class AffineOperator(LinearOperator):
    """W x + b; the row holds W by rows, then b."""

    name = "affine"
    has_offset = True

    def shapes(self, dim: int) -> Shapes:
        return ((dim, dim), (dim,))

    def identity(self, dim: int) -> Tensor:
        return torch.cat([super().identity(dim), torch.zeros(dim)])

    def apply(self, entity: Tensor, row: Tensor) -> Tensor:
        return super().apply(entity, row) + row[..., -entity.shape[-1] :]

    def offset(self, row: Tensor, dim: int) -> Tensor:
        return row[..., -dim:]


class ComplexDiagonalOperator(BigraphOperator):
    """Element-wise product of complex numbers (Trouillon et al. 2016); the row holds real, then imaginary."""

    name = "complex_diagonal"
    complex_valued = True
    dim_multiple = 2

    def shapes(self, dim: int) -> Shapes:
        return ((dim // 2,), (dim // 2,))

    def identity(self, dim: int) -> Tensor:
        return torch.cat([torch.ones(dim // 2), torch.zeros(dim // 2)])

    def apply(self, entity: Tensor, row: Tensor) -> Tensor:
        real, imaginary = row.chunk(2, dim=-1)
        return complex_product(entity, real, imaginary)

    def transposed(self, entity: Tensor, row: Tensor) -> Tensor:
        """Return the products with the conjugates: Re sum x conj(y z) = Re sum (x conj(z)) conj(y)."""
        real, imaginary = row.chunk(2, dim=-1)
        return complex_product(entity, real, -imaginary)

    def gain(self, row: Tensor, dim: int) -> Tensor:
        return torch.hypot(*row.chunk(2, dim=-1)).amax(-1)


_PRODUCTS = (DiagonalOperator, LinearOperator, AffineOperator, ComplexDiagonalOperator)
OPERATORS = {kind.name: kind() for kind in (BigraphOperator, TranslationOperator, *_PRODUCTS)}
"""By PyTorch-BigGraph's name."""

NUMBERS = {name: number for number, name in enumerate(OPERATORS)}
"""Of the operators, in the last number of rows of :class:`OperatorByRelation`."""

MATRICES = {LinearOperator.name, AffineOperator.name}
"""Operators that may map rows of one width to another."""

SEPARATOR = "+"
"""Between the names of several operators."""


class OperatorByRelation(BigraphOperator):
    """One of several operators, each relation's own; rows start as the first one's.

    A relation's row holds the operator's parameters, 0 up to the widest operator's, and the operator's number
    in :data:`NUMBERS`. Neither 0 nor number gets a gradient.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.operators = [OPERATORS[name] for name in names]
        # Instances, as the facts are those of all operators together.
        self.name = SEPARATOR.join(names)  # type: ignore[misc]
        self.has_offset = any(operator.has_offset for operator in self.operators)  # type: ignore[misc]
        self.cancels = any(operator.cancels for operator in self.operators)  # type: ignore[misc]
        self.dim_multiple = max(operator.dim_multiple for operator in self.operators)  # type: ignore[misc]

    def row_dim(self, dim: int) -> int:
        return max(operator.row_dim(dim) for operator in self.operators) + 1

    def identity(self, dim: int) -> Tensor:
        return self.rows_of([self.operators[0].name], dim)[0]

    def rows_of(self, names: Sequence[str], dim: int) -> Tensor:
        """Return rows (n, Dr) of the identity, each of the operator of a name."""
        rows = torch.zeros(len(names), self.row_dim(dim))
        for row, name in zip(rows, names):
            parameters = OPERATORS[name].identity(dim)
            row[: len(parameters)] = parameters
            row[-1] = NUMBERS[name]
        return rows

    def apply(self, entity: Tensor, row: Tensor) -> Tensor:
        return self._by_row(lambda g, r: g.apply(entity, r), row, entity.shape[-1])

    def transposed(self, entity: Tensor, row: Tensor) -> Tensor:
        return self._by_row(lambda g, r: g.transposed(entity, r), row, entity.shape[-1])

    def offset(self, row: Tensor, dim: int) -> Tensor:
        return self._by_row(lambda g, r: g.offset(r, dim), row, dim)

    def gain(self, row: Tensor, dim: int) -> Tensor:
        return self._by_row(lambda g, r: g.gain(r, dim).unsqueeze(-1), row, dim).squeeze(-1)

    @staticmethod
    def _by_row(compute: Callable[[BigraphOperator, Tensor], Tensor], row: Tensor, dim: int) -> Tensor:
        """Return the result of each row's operator: all that occur compute, and each row takes its own."""
        own_number = row[..., -1:].detach()
        operators = list(OPERATORS.values())
        results: list[Tensor] = []
        for number in own_number.unique().tolist() or [0]:
            operator = operators[int(number)]
            result = compute(operator, row[..., : operator.row_dim(dim)])
            results.append(torch.where(own_number == number, result, results[-1]) if results else result)
        return results[-1]
