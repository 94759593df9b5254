"""PyTorch-BigGraph's operators: how a relation acts on an entity's row.

Names, shapes, first values and formulas are those of its documentation ("Scoring", operators) and of its
checkpoints. A relation's row holds the operator's parameters one after the other. :mod:`.bigraph_scores`
combines each operator with each comparator.
"""

from __future__ import annotations

import math
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

    def offset(self, row: Tensor) -> Tensor:
        """Return b, (..., D), of an operator that has one."""
        raise NotImplementedError(f"the operator {self.name} has no offset")

    def gains(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return bounds (...) of |A| and |b| in |A x + b| <= |A| |x| + |b|."""
        return torch.ones_like(row[..., 0]), torch.zeros_like(row[..., 0])


class TranslationOperator(BigraphOperator):
    """x + b (Bordes et al. 2013)."""

    name = "translation"
    has_offset = True

    def shapes(self, dim: int) -> Shapes:
        """Return the shape of b."""
        return ((dim,),)

    def identity(self, dim: int) -> Tensor:
        """Return zeros."""
        return torch.zeros(dim)

    def apply(self, entity: Tensor, row: Tensor) -> Tensor:
        """Return x + b."""
        return entity + row

    def transposed(self, entity: Tensor, row: Tensor) -> Tensor:
        """Return x: A is the identity."""
        return super().apply(entity, row)

    def offset(self, row: Tensor) -> Tensor:
        """Return b."""
        return row

    def gains(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 and |b|."""
        return torch.ones_like(row[..., 0]), row.norm(dim=-1)


class DiagonalOperator(BigraphOperator):
    """Element-wise product d x (Yang et al. 2015)."""

    name = "diagonal"

    def shapes(self, dim: int) -> Shapes:
        """Return the shape of d."""
        return ((dim,),)

    def identity(self, dim: int) -> Tensor:
        """Return ones."""
        return torch.ones(dim)

    def apply(self, entity: Tensor, row: Tensor) -> Tensor:
        """Return d x."""
        return entity * row

    def gains(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the greatest |d_k|, and 0."""
        return row.abs().amax(-1), torch.zeros_like(row[..., 0])


class LinearOperator(BigraphOperator):
    """Product with a matrix, W x (Nickel et al. 2011); the row holds W by rows."""

    name = "linear"
    cancels = True

    def shapes(self, dim: int) -> Shapes:
        """Return the shape of W."""
        return ((dim, dim),)

    def identity(self, dim: int) -> Tensor:
        """Return the identity matrix."""
        return torch.eye(dim).reshape(-1)

    def apply(self, entity: Tensor, row: Tensor) -> Tensor:
        """Return W x."""
        # einsum and not matmul: leading dimensions of 1 broadcast without copies of the matrices.
        return torch.einsum("...ij,...j->...i", self._matrix(row, entity.shape[-1]), entity)

    def transposed(self, entity: Tensor, row: Tensor) -> Tensor:
        """Return W' x."""
        return torch.einsum("...ji,...j->...i", self._matrix(row, entity.shape[-1]), entity)

    def gains(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Frobenius norm of W, which is at least its spectral norm, and 0."""
        return row.norm(dim=-1), torch.zeros_like(row[..., 0])

    @staticmethod
    def _matrix(row: Tensor, dim: int) -> Tensor:
        return row[..., : dim * dim].unflatten(-1, (dim, dim))


class AffineOperator(LinearOperator):
    """W x + b; the row holds W by rows, then b."""

    name = "affine"
    has_offset = True

    def shapes(self, dim: int) -> Shapes:
        """Return the shapes of W and b."""
        return ((dim, dim), (dim,))

    def identity(self, dim: int) -> Tensor:
        """Return the identity matrix and zeros."""
        return torch.cat([super().identity(dim), torch.zeros(dim)])

    def apply(self, entity: Tensor, row: Tensor) -> Tensor:
        """Return W x + b."""
        return super().apply(entity, row) + row[..., -entity.shape[-1] :]

    def offset(self, row: Tensor) -> Tensor:
        """Return b; its width follows from that of the row, D^2 + D."""
        dim = (math.isqrt(1 + 4 * row.shape[-1]) - 1) // 2
        return row[..., -dim:]

    def gains(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Frobenius norm of W, and |b|."""
        offset = self.offset(row)
        return row[..., : -offset.shape[-1]].norm(dim=-1), offset.norm(dim=-1)


class ComplexDiagonalOperator(BigraphOperator):
    """Element-wise product of complex numbers (Trouillon et al. 2016); the row holds real, then imaginary."""

    name = "complex_diagonal"
    complex_valued = True

    def shapes(self, dim: int) -> Shapes:
        """Return the shapes of the parts."""
        return ((dim // 2,), (dim // 2,))

    def identity(self, dim: int) -> Tensor:
        """Return real parts of 1 and imaginary parts of 0."""
        return torch.cat([torch.ones(dim // 2), torch.zeros(dim // 2)])

    def apply(self, entity: Tensor, row: Tensor) -> Tensor:
        """Return the products of the complex numbers."""
        real, imaginary = row.chunk(2, dim=-1)
        return complex_product(entity, real, imaginary)

    def transposed(self, entity: Tensor, row: Tensor) -> Tensor:
        """Return the products with the conjugates: Re sum x conj(y z) = Re sum (x conj(z)) conj(y)."""
        real, imaginary = row.chunk(2, dim=-1)
        return complex_product(entity, real, -imaginary)

    def gains(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the greatest modulus, and 0."""
        moduli = torch.hypot(*row.chunk(2, dim=-1))
        return moduli.amax(-1), torch.zeros_like(row[..., 0])


OPERATORS = {
    operator.name: operator
    for operator in (
        BigraphOperator(),
        TranslationOperator(),
        DiagonalOperator(),
        LinearOperator(),
        AffineOperator(),
        ComplexDiagonalOperator(),
    )
}
"""By PyTorch-BigGraph's name."""
