"""Comparators whose candidates the relation changes too: its part is in the query, which is wider than a row.

A query is [q, numbers of the relation]. So everything that compares queries with candidates (ranking,
prediction, negatives, all candidates) works as it does with any other comparator. No matmul of a query and a
candidate gives these scores. They are computed in blocks of bounded memory, and once more for the gradients.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from dglkge.model.functions.comparators import (
    FLOAT32_UNIT,
    SAFETY,
    TINY_MODULUS_PER_DIM,
    Comparator,
    _unless_overflow,
    unit_rows,
)
from dglkge.registry import deferred

if TYPE_CHECKING:
    import torch

    from dglkge.model.functions import blockwise
else:
    torch = deferred("torch")
    blockwise = deferred("dglkge.model.functions.blockwise")


class ScaledL1(Comparator):
    """-sum_k |a_k - s_k c_k / |c||: a query is [offsets a, scales s], (..., 2 D)."""

    memory_passes = 16
    fuses_pairs = True

    def query_dim(self, dim: int) -> int:
        """Return the width of offsets and scales."""
        return 2 * dim

    def compare(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score every pair: compiled loops on a CPU, elsewhere blocks."""
        offset, scale = query.chunk(2, dim=-1)
        return -blockwise.ScaledManhattan.apply(offset, scale, unit_rows(candidates))

    def compare_fused(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score every pair by its terms."""
        offset, scale = query.unsqueeze(1).chunk(2, dim=-1)
        return -(offset - scale * unit_rows(candidates)).abs().sum(-1)

    def compare_pairs(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score query i against candidate i."""
        offset, scale = query.chunk(2, dim=-1)
        return -(offset - scale * unit_rows(candidates)).abs().sum(-1)

    def rounding_bound(
        self, query: torch.Tensor, max_candidate_norm: float, true_scores: torch.Tensor
    ) -> torch.Tensor:
        """Return (D + 8) u t + 2 u sum|a| + (D + 14) u |s|.

        The rounding of a and s and the product are each u of a term of a sum that is at most sum|a| or, as
        the row has norm 1, |s|; that of the unit row is (D + 8) u; the sum itself is relative to the
        distance t.
        """
        offset, scale = query.chunk(2, dim=-1)
        dim = offset.shape[1]
        lengths = scale.norm(dim=1)
        rounded = 2 * offset.abs().sum(1) + (dim + 14) * lengths
        bound = SAFETY * FLOAT32_UNIT * ((dim + 8) * -true_scores + rounded) + dim * TINY_MODULUS_PER_DIM
        # The candidates' norm counts: beyond float32's range a row has no direction.
        magnitude = (offset.norm(dim=1) + lengths).square() * dim + max_candidate_norm**2
        return _unless_overflow(bound, magnitude)


class ProjectedDistance(Comparator):
    """-|q - c M|: a query is [q, the D rows of a matrix M], (..., D + D D)."""

    memory_passes = 0
    norm: ClassVar[int] = 2
    """1: Manhattan, 2: Euclidean."""

    def query_dim(self, dim: int) -> int:
        """Return the width of a point and a matrix."""
        return dim + dim * dim

    def operations(self, dim: int) -> float:
        """Return those of a row and a matrix, divided by the numbers of a score, the block's twice."""
        # A training step has 3 matmuls on each side; blocks are scored once more for their gradients.
        return 2 * dim * 4 / 3

    def compare(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score every pair, in blocks: one matmul projects candidates by the matrices of several queries."""
        return -blockwise.by_blocks(self._distances, query, candidates, candidates.shape[1])

    def _distances(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Return the distances (b, n) of a block."""
        num, dim = len(query), candidates.shape[1]
        matrices = query[:, dim:].unflatten(-1, (dim, dim))
        projected = candidates @ matrices.transpose(0, 1).reshape(dim, num * dim)
        differences = projected.view(len(candidates), num, dim) - query[:, :dim]
        return torch.linalg.vector_norm(differences, ord=self.norm, dim=-1).T

    def compare_pairs(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Score query i against candidate i."""
        dim = candidates.shape[-1]
        matrices = query[..., dim:].unflatten(-1, (dim, dim))
        # einsum broadcasts dimensions of size 1 without a copy of the matrices for each pair.
        differences = query[..., :dim] - torch.einsum("...i,...ij->...j", candidates, matrices)
        return -torch.linalg.vector_norm(differences, ord=self.norm, dim=-1)

    def rounding_bound(
        self, query: torch.Tensor, max_candidate_norm: float, true_scores: torch.Tensor
    ) -> torch.Tensor:
        """Return (D + 8) u t + e: e bounds the error of q - c M, as a vector.

        Its Euclidean norm is at most u |q| + (D + 2) u |c| |M|, with |M| the Frobenius norm, by Cauchy and
        Schwarz for each column; its Manhattan norm is at most sqrt(D) times that.
        """
        dim = (math.isqrt(1 + 4 * query.shape[1]) - 1) // 2
        point, matrix = query[:, :dim].norm(dim=1), query[:, dim:].norm(dim=1)
        error = 2 * point + (dim + 4) * max_candidate_norm * matrix
        factor = math.sqrt(dim) if self.norm == 1 else 1.0
        bound = SAFETY * FLOAT32_UNIT * (factor * error + (dim + 8) * -true_scores)
        # Only the Euclidean norm squares.
        magnitude = (point + max_candidate_norm * matrix).pow(self.norm) * dim
        return _unless_overflow(bound + dim * TINY_MODULUS_PER_DIM, magnitude)
