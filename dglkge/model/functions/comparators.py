"""Comparators of queries and candidate rows: the second half of every score function.

Higher is better everywhere. Each comparator also bounds its own float32 rounding, from the standard
model of floating-point arithmetic (Higham, Accuracy and Stability of Numerical Algorithms, 2002,
section 3.1): a sum of D products in any order is off by at most ``D u / (1 - D u)`` of the sum of their
absolute values, with u = 2^-24. Ranking trusts a float32 score only as far as that bound.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from dglkge.model.functions import Tensor, autograd_functions, torch

FLOAT32_UNIT = 2.0**-24
FLOAT32_SAFE_MAX = 1e37
"""Limit of products and squares: above it float32 may overflow (at 3.4e38), and no bound holds."""
SAFETY = 1.05
"""Factor for the second-order terms that the bounds omit (D u is below 0.01 for D up to 160,000)."""
SAFE_UNIT = SAFETY * FLOAT32_UNIT
TINY_PER_DIM = 1e-37
"""Error of underflow per product of two float32 numbers (2^-126, even if flushed to 0)."""
TINY_MODULUS_PER_DIM = 1e-18
"""The same under a square root."""

METRICS = INNER_PRODUCT, L2, COSINE = ("inner-product", "l2", "cosine")
"""Metrics by which an index finds the rows nearest to a query."""


class Comparator(ABC):
    """Compares queries with candidates; stateless.

    Attributes
    ----------
    matmul_operations : int
        Floating-point operations of a matmul for each number of a score, forward: 2, a product and a sum,
        or 0 where no matmul gives the score.
    memory_passes : int
        How often the numbers that are compared go through memory in a training step, as float32, both
        sides, forward and backward: 0 where a matmul gives the score.
    metric : str
        One of :data:`METRICS`: that which orders candidates as the score does, or the nearest to it.
    is_product : bool
        Whether scores are the inner products of queries and rows. A subclass that compares otherwise does not
        inherit the fact.
    fuses_pairs : bool
        Whether :meth:`compare_fused` has a term for each number of each pair: small only if compiled.
    """

    matmul_operations: ClassVar[int] = 0
    memory_passes: ClassVar[int] = 12
    metric: ClassVar[str] = L2
    is_product: ClassVar[bool] = False
    fuses_pairs: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        members = cls.__dict__
        if "compare" in members or "compare_pairs" in members:
            cls.is_product = members.get("is_product", False)
            if "compare_fused" not in members:
                # A subclass with scores of its own must not inherit the written-out terms of its base.
                cls.compare_fused = Comparator.compare_fused  # type: ignore[method-assign]
                cls.fuses_pairs = False

    def query_dim(self, dim: int) -> int:
        """Return the width of queries for candidates of width dim."""
        return dim

    def operations(self, dim: int) -> float:
        """Return ``matmul_operations`` where it depends on the width of candidates."""
        return self.matmul_operations

    @abstractmethod
    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Score every query against every candidate.

        Parameters
        ----------
        query : (B, D) tensor
            Of width ``query_dim(D)``, like all queries below.
        candidates : (N, D) tensor

        Returns
        -------
        (B, N) tensor
        """

    def compare_plainly(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Score every query against every candidate by :meth:`compare_pairs`, differentiated by autograd.

        The reference for :meth:`compare`; it takes B N D numbers of memory for each operation.
        """
        return self.compare_pairs(query.unsqueeze(1), candidates.unsqueeze(0))

    def compare_fused(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Score every query against every candidate in the form that ``torch.compile`` takes.

        A comparator without matmul writes out the terms of all pairs: the compiler sums them in registers,
        forward and backward.
        """
        return self.compare(query, candidates)

    @abstractmethod
    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Score query i against candidate i: (B, D), (B, D) -> (B,); leading dimensions broadcast.

        In float64 this is the definition that ranking holds to.
        """

    @abstractmethod
    def rounding_bound(self, query: Tensor, max_candidate_norm: float, true_scores: Tensor) -> Tensor:
        """Bound the distance from the true score at which a float32 score may be on the wrong side of it.

        Parameters
        ----------
        query : (Q, D) float64 tensor
            The queries before they were rounded to float32.
        max_candidate_norm : float
            Greatest Euclidean norm of a candidate row.
        true_scores : (Q,) float64 tensor
            Exact scores of the true answers.

        Returns
        -------
        (Q,) float64 tensor
            b such that :meth:`compare` in float32 above ``true + b`` implies an exact score above
            ``true``, and the same below; infinite where float32 may overflow.
        """


class ByMatmul(Comparator):
    """Comparator whose scores come from one matmul."""

    matmul_operations = 2
    memory_passes = 0


class Dot(ByMatmul):
    """Inner product, q.c (PyTorch-BigGraph's comparator ``dot``)."""

    metric = INNER_PRODUCT
    is_product = True

    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        return autograd_functions.product(query, candidates)

    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        return (query * candidates).sum(-1)

    def rounding_bound(self, query: Tensor, max_candidate_norm: float, true_scores: Tensor) -> Tensor:
        """Return (D + 2) u |q| max|c|: D for the product, 1 for the rounding of q, 1 to spare."""
        dim = query.shape[1]
        products = query.norm(dim=1) * max_candidate_norm
        # Cauchy-Schwarz: sum_k |q_k c_k| <= |q| |c|, so one norm of all candidates serves every score.
        bound = SAFE_UNIT * (dim + 2) * products + dim * TINY_PER_DIM
        return unless_overflow(bound, products)


class NegativeL2(ByMatmul):
    """Minus the Euclidean distance, -|q - c| (PyTorch-BigGraph's comparator ``l2``)."""

    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Score every pair by one matrix product; distances below float32's resolution are noise."""
        return -autograd_functions.EuclideanDistance.apply(query, candidates)

    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        return -torch.linalg.vector_norm(query - candidates, dim=-1)

    def rounding_bound(self, query: Tensor, max_candidate_norm: float, true_scores: Tensor) -> Tensor:
        """Bound the square by E = (D + 8) u (|q| + max|c|)^2, then carry E through the square root.

        A candidate at most as far as the true answer, at distance t, has a computed distance of at most
        sqrt(t^2 + E); one at least as far has at least sqrt(t^2 - E), which lies farther from t.
        """
        dim = query.shape[1]
        squares = (query.norm(dim=1) + max_candidate_norm).square()
        error = _square_error(squares, dim)
        distance = -true_scores
        # distance - near = error / (distance + near): the difference itself would cancel in floating point.
        near = (distance.square() - error).clamp_min(0).sqrt()
        bound = error / (distance + near).clamp_min(math.sqrt(TINY_PER_DIM))
        bound = torch.minimum(bound, error.sqrt()) + 4 * FLOAT32_UNIT * (distance + error.sqrt())
        return unless_overflow(bound, squares)


class NegativeSquaredL2(ByMatmul):
    """Minus the squared Euclidean distance, -|q - c|^2 (PyTorch-BigGraph's comparator ``squared_l2``)."""

    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        products = autograd_functions.product(query, candidates)
        return 2 * products - candidates.square().sum(1) - query.square().sum(1, keepdim=True)

    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        return -(query - candidates).square().sum(-1)

    def rounding_bound(self, query: Tensor, max_candidate_norm: float, true_scores: Tensor) -> Tensor:
        """Return E of :class:`NegativeL2`: the error of a square."""
        squares = (query.norm(dim=1) + max_candidate_norm).square()
        return unless_overflow(_square_error(squares, query.shape[1]), squares)


class Cosine(ByMatmul):
    """Cosine, q.c / (|q| |c|) (PyTorch-BigGraph's comparator ``cos``); 0 where a row is 0, there NaN."""

    metric = COSINE

    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        return autograd_functions.product(unit_rows(query), unit_rows(candidates))

    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        return (unit_rows(query) * unit_rows(candidates)).sum(-1)

    def rounding_bound(self, query: Tensor, max_candidate_norm: float, true_scores: Tensor) -> Tensor:
        """Return (2 D + 40) u: (D + 8) u for both unit rows, D u for the product, the rest to spare.

        It does not depend on the candidates: unit rows are scaled by their greatest number before they are
        squared, so their relative error does not depend on their length. A query so short that float32
        rounds its numbers to denormal ones has a bound beyond every difference of cosines.
        """
        dim = query.shape[1]
        norms = query.norm(dim=1)
        bound = torch.full_like(norms, SAFE_UNIT * (2 * dim + 40))
        bound = torch.where((norms < SHORTEST_UNIT_ROW) & (norms > 0), 2 * SAFETY, bound)
        return unless_overflow(bound, norms * max_candidate_norm)


SHORTEST_UNIT_ROW = 1e-30
"""Length of a row below which rounding to float32 may change its direction."""


def unit_rows(rows: Tensor) -> Tensor:
    """Return rows (..., D) divided by their Euclidean length; rows of 0 stay 0, with gradients of 0."""
    # Divided by the greatest number first: the squares of short and long rows leave float32's range. The
    # result does not depend on that number, so autograd need not see it.
    greatest = rows.detach().abs().amax(-1, keepdim=True)
    scaled = rows / greatest.masked_fill(greatest == 0, math.inf)
    lengths = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / lengths.masked_fill(lengths == 0, math.inf)


def _square_error(squares: Tensor, dim: int) -> Tensor:
    """Return E = (D + 8) u (|q| + max|c|)^2, the error of |q|^2 + |c|^2 - 2 q.c, from those squares."""
    return SAFE_UNIT * (dim + 8) * squares + dim * TINY_PER_DIM


class _SummedTerms(Comparator):
    """Distance that is a sum of non-negative terms of each pair, which a compiler may fuse."""

    fuses_pairs = True

    def rounding_bound(self, query: Tensor, max_candidate_norm: float, true_scores: Tensor) -> Tensor:
        """Return (D + 8) u t + 2 u sum|q|: nothing cancels, so the error is relative to the distance t.

        For moduli it is D / 2 for the sum, 5 for a modulus, the rest to spare.
        """
        dim = query.shape[1]
        bound = SAFE_UNIT * ((dim + 8) * -true_scores + 2 * query.abs().sum(1))
        magnitude = (query.norm(dim=1) + max_candidate_norm).square() * dim
        return unless_overflow(bound + dim * TINY_MODULUS_PER_DIM, magnitude)


class NegativeL1(_SummedTerms):
    """Minus the Manhattan distance, -sum |q_k - c_k|. PyTorch-BigGraph has no such comparator."""

    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        return -autograd_functions.ManhattanDistance.apply(query, candidates)

    compare_fused = Comparator.compare_plainly

    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        return -(query - candidates).abs().sum(-1)


class NegativeModulus(_SummedTerms):
    """Minus the sum of complex moduli, -sum |q_k - c_k|, first half of a row real, second imaginary.

    PyTorch-BigGraph has no such comparator.
    """

    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        return -autograd_functions.ModulusDistance.apply(query, candidates)

    def compare_fused(self, query: Tensor, candidates: Tensor) -> Tensor:
        real, imaginary = (query.unsqueeze(1) - candidates.unsqueeze(0)).chunk(2, dim=-1)
        squares = real.square() + imaginary.square()
        # Autograd divides by the root, so the root of 0 must not be taken.
        moduli = torch.where(squares > 0, squares, 1).sqrt()
        return -torch.where(squares > 0, moduli, 0).sum(-1)

    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        return -autograd_functions.SummedModuli.apply(query - candidates)


def unless_overflow(bound: Tensor, magnitude: Tensor) -> Tensor:
    """Return the bound, infinite where float32 may overflow (or something is not a number)."""
    # `<=` is False for NaN, so a magnitude that is not a number gives infinity as well.
    return torch.where(magnitude <= FLOAT32_SAFE_MAX, bound, math.inf)


def complex_product(rows: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    """Multiply rows of [real, imaginary] parts (..., D) by complex numbers given in parts (..., D / 2)."""
    # Written out on halves: torch's complex type would need interleaved parts, so a copy of the rows.
    row_real, row_imaginary = rows.chunk(2, dim=-1)
    product_real = row_real * real - row_imaginary * imaginary
    product_imaginary = row_real * imaginary + row_imaginary * real
    return torch.cat([product_real, product_imaginary], dim=-1)
