"""How a query is compared with candidate rows: the second half of every score function.

Autograd through ``sqrt`` divides by the distance. Near 0 that is a division by rounding noise, so both
functions here write their backward pass by hand and give 0 where float32 cannot tell two rows apart.

Higher is better everywhere. Each comparator also bounds its own float32 rounding, from the standard
model of floating-point arithmetic (Higham, Accuracy and Stability of Numerical Algorithms, 2002,
section 3.1): a sum of D products in any order is off by at most ``D u / (1 - D u)`` of the sum of their
absolute values, with u = 2^-24. Ranking trusts a float32 score only as far as that bound.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from dglkge.kernels.modulus import add_query_gradient, fill_distances

MODULUS_BLOCK_ELEMENTS = 1 << 17
"""Complex numbers handled at a time by :class:`ModulusDistance`: half a MiB, which stays in cache."""

NEGLIGIBLE_GRADIENT = 1e-30


class EuclideanDistance(torch.autograd.Function):
    """Euclidean distances by one matrix product: |q - c|^2 = |q|^2 + |c|^2 - 2 q.c.

    The product loses about ``eps (|q|^2 + |c|^2)`` of the square. Distances below that are noise, and
    their gradient is 0; above it the gradient (q - c) / |q - c| is bounded as it should be.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Return the distances, (B, N), of query (B, D) and candidates (N, D)."""
        query_squares = query.square().sum(1)
        candidate_squares = candidates.square().sum(1)
        squares = torch.addmm(candidate_squares.unsqueeze(0), query, candidates.T, alpha=-2)
        distances = squares.add_(query_squares.unsqueeze(1)).clamp_min_(0).sqrt_()
        ctx.save_for_backward(query, candidates, query_squares, candidate_squares, distances)
        return distances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of query and candidates, two matrix products."""
        query, candidates, query_squares, candidate_squares, distances = ctx.saved_tensors
        noise = 8 * torch.finfo(distances.dtype).eps
        floor = (query_squares.unsqueeze(1) + candidate_squares.unsqueeze(0)).mul_(noise).sqrt_()
        weights = (grad / distances).masked_fill_(distances <= floor, 0)
        grad_query = query * weights.sum(1, keepdim=True) - weights @ candidates
        grad_candidates = candidates * weights.sum(0).unsqueeze(1) - weights.T @ query
        return grad_query, grad_candidates


class ModulusDistance(torch.autograd.Function):
    """Sum of complex moduli |q_k - c_k| for rows whose first half is real and second half imaginary.

    No matrix product gives this, so it is elementwise: by compiled loops on a CPU, elsewhere by torch, block
    by block. The backward pass computes the moduli again instead of keeping (B, N, D / 2) numbers.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Return the distances, (B, N), of query (B, D) and candidates (N, D)."""
        ctx.save_for_backward(query, candidates)
        distances = query.new_empty(len(query), len(candidates))
        if _compiled(query):
            fill_distances(_array(query), _array(candidates), distances.numpy())
            return distances
        for rows, columns in _blocks(query, candidates):
            real, imaginary = _differences(query[rows], candidates[columns])
            moduli = real.square_().add_(imaginary.square_()).sqrt_()
            distances[rows, columns] = moduli.sum(2)
        return distances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of query and candidates; 0 where two complex numbers coincide."""
        query, candidates = ctx.saved_tensors
        # A softmax leaves gradients of 1e-40 here, and arithmetic on denormal numbers is 100 times slower.
        grad = grad.masked_fill(grad.abs() < NEGLIGIBLE_GRADIENT, 0)
        grad_query = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        grad_candidates = torch.zeros(candidates.shape, dtype=query.dtype, device=query.device)
        if _compiled(query):
            add_query_gradient(_array(query), _array(candidates), _array(grad), grad_query.numpy())
            add_query_gradient(_array(candidates), _array(query), _array(grad.T), grad_candidates.numpy())
            return grad_query, grad_candidates
        half = query.shape[1] // 2
        for rows, columns in _blocks(query, candidates):
            real, imaginary = _differences(query[rows], candidates[columns])
            moduli = real.square().add_(imaginary.square()).sqrt_()
            weights = (grad[rows, columns].unsqueeze(2) / moduli).masked_fill_(moduli == 0, 0)
            for part, columns_of_part in ((real, slice(0, half)), (imaginary, slice(half, None))):
                part.mul_(weights)
                grad_query[rows, columns_of_part] += part.sum(1)
                grad_candidates[columns, columns_of_part] -= part.sum(0)
        return grad_query, grad_candidates


def _compiled(rows: torch.Tensor) -> bool:
    """Say whether the compiled loops can work on these rows."""
    return rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64)


def _array(rows: torch.Tensor) -> np.ndarray:
    return rows.detach().contiguous().numpy()


def _blocks(query: torch.Tensor, candidates: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the queries and of the candidates that together fit in cache."""
    half = max(1, query.shape[1] // 2)
    num_columns = max(1, min(len(candidates), MODULUS_BLOCK_ELEMENTS // half))
    num_rows = max(1, MODULUS_BLOCK_ELEMENTS // (half * num_columns))
    for first_row in range(0, len(query), num_rows):
        for first_column in range(0, len(candidates), num_columns):
            yield slice(first_row, first_row + num_rows), slice(first_column, first_column + num_columns)


def _differences(query: torch.Tensor, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return real and imaginary parts of all differences, (b, n, D / 2) each."""
    half = query.shape[1] // 2
    real = query[:, None, :half] - candidates[None, :, :half]
    imaginary = query[:, None, half:] - candidates[None, :, half:]
    return real, imaginary


FLOAT32_UNIT = 2.0**-24
FLOAT32_SAFE_MAX = 1e37
"""Where a product or a square may pass this, float32 may overflow and no bound holds."""
SAFETY = 1.05
"""Covers the second-order terms that the bounds leave out (D u is below 0.01 for D up to 160,000)."""
TINY_PER_DIM = 1e-37
"""What underflow can cost per product of two float32 numbers (2^-126, even if flushed to 0)."""
TINY_MODULUS_PER_DIM = 1e-18
"""The same under a square root."""


class Comparator(ABC):
    """Compares queries with candidates; stateless."""

    @abstractmethod
    def compare(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score every query against every candidate.

        Parameters
        ----------
        query : (B, D) tensor
        candidates : (N, D) tensor

        Returns
        -------
        (B, N) tensor
        """

    @abstractmethod
    def compare_pairs(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score query i against candidate i: (B, D), (B, D) -> (B,).

        In float64 this is the definition that ranking holds to.
        """

    @abstractmethod
    def rounding_bound(
        self, query: torch.Tensor, max_candidate_norm: float, true_scores: torch.Tensor
    ) -> torch.Tensor:
        """Say how far from the true score a float32 score decides which of the two is greater.

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


class Dot(Comparator):
    """Inner product, q.c (PyTorch-BigGraph's comparator ``dot``)."""

    def compare(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score every pair by one matrix product."""
        return query @ candidates.T

    def compare_pairs(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score query i against candidate i."""
        return (query * candidates).sum(-1)

    def rounding_bound(
        self, query: torch.Tensor, max_candidate_norm: float, true_scores: torch.Tensor
    ) -> torch.Tensor:
        """Return (D + 2) u |q| max|c|: D for the product, 1 for the rounding of q, 1 to spare."""
        dim = query.shape[1]
        products = query.norm(dim=1) * max_candidate_norm
        bound = SAFETY * (dim + 2) * FLOAT32_UNIT * products + dim * TINY_PER_DIM
        return _unless_overflow(bound, products)


class NegativeL2(Comparator):
    """Minus the Euclidean distance, -|q - c| (PyTorch-BigGraph's comparator ``l2``)."""

    def compare(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score every pair by one matrix product; distances below float32's resolution are noise."""
        return -EuclideanDistance.apply(query, candidates)

    def compare_pairs(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score query i against candidate i; the gradient at distance 0 is 0."""
        return -torch.linalg.vector_norm(query - candidates, dim=-1)

    def rounding_bound(
        self, query: torch.Tensor, max_candidate_norm: float, true_scores: torch.Tensor
    ) -> torch.Tensor:
        """Bound the square by E = (D + 8) u (|q| + max|c|)^2, then carry E through the square root.

        A candidate at most as far as the true answer, at distance t, has a computed distance of at most
        sqrt(t^2 + E); one at least as far has at least sqrt(t^2 - E), which lies farther from t.
        """
        dim = query.shape[1]
        squares = (query.norm(dim=1) + max_candidate_norm).square()
        error = SAFETY * (dim + 8) * FLOAT32_UNIT * squares + dim * TINY_PER_DIM
        distance = -true_scores
        near = (distance.square() - error).clamp_min(0).sqrt()
        bound = error / (distance + near).clamp_min(math.sqrt(TINY_PER_DIM))
        bound = torch.minimum(bound, error.sqrt()) + 4 * FLOAT32_UNIT * (distance + error.sqrt())
        return _unless_overflow(bound, squares)


class NegativeL1(Comparator):
    """Minus the Manhattan distance, -sum |q_k - c_k|. PyTorch-BigGraph has no such comparator."""

    def compare(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score every pair by torch's fused kernel."""
        return -torch.cdist(query, candidates, p=1.0)

    def compare_pairs(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score query i against candidate i."""
        return -(query - candidates).abs().sum(-1)

    def rounding_bound(
        self, query: torch.Tensor, max_candidate_norm: float, true_scores: torch.Tensor
    ) -> torch.Tensor:
        """Return (D + 8) u t + 2 u sum|q|: nothing cancels, so the error is relative to the distance t."""
        return _distance_bound(query, max_candidate_norm, true_scores)


class NegativeModulus(Comparator):
    """Minus the sum of complex moduli, -sum |q_k - c_k|, first half of a row real, second imaginary.

    PyTorch-BigGraph has no such comparator.
    """

    def compare(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score every pair, elementwise in blocks."""
        return -ModulusDistance.apply(query, candidates)

    def compare_pairs(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score query i against candidate i; the gradient of a modulus of 0 is 0."""
        difference = (query - candidates).unflatten(-1, (2, -1))
        return -torch.linalg.vector_norm(difference, dim=-2).sum(-1)

    def rounding_bound(
        self, query: torch.Tensor, max_candidate_norm: float, true_scores: torch.Tensor
    ) -> torch.Tensor:
        """Return (D + 8) u t + 2 u sum|q|: D / 2 for the sum, 5 for a modulus, the rest to spare."""
        return _distance_bound(query, max_candidate_norm, true_scores)


def _distance_bound(
    query: torch.Tensor, max_candidate_norm: float, true_scores: torch.Tensor
) -> torch.Tensor:
    dim = query.shape[1]
    rounding_of_query = 2 * FLOAT32_UNIT * query.abs().sum(1)
    bound = (
        SAFETY * ((dim + 8) * FLOAT32_UNIT * -true_scores + rounding_of_query) + dim * TINY_MODULUS_PER_DIM
    )
    return _unless_overflow(bound, (query.norm(dim=1) + max_candidate_norm).square() * dim)


def _unless_overflow(bound: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """Return the bound, infinite where float32 may overflow (or something is not a number)."""
    return torch.where(magnitude <= FLOAT32_SAFE_MAX, bound, math.inf)
