"""Score functions whose relations change both entities before they are compared: PairRE, TripleRE, TransR.

What a relation does to the candidates is the second part of a query, which is wider than a row: [q, numbers
of the relation]. So everything that compares queries with candidates (ranking, prediction, negatives, all
candidates) works as it does with any other comparator. No matmul of a query and a candidate gives these
scores. They are computed in blocks of bounded memory, and once more for the gradients.
"""

from __future__ import annotations

import math
from typing import ClassVar

from dglkge.model.functions import Tensor, autograd_functions, comparators, torch
from dglkge.model.functions.comparators import SAFE_UNIT, Comparator, unit_rows, unless_overflow
from dglkge.model.score_functions import SCORE_FUNCTIONS, ScoreFunction


class ScaledL1(Comparator):
    """-sum_k |a_k - s_k c_k / |c||: a query is [offsets a, scales s], (..., 2 D)."""

    memory_passes = 16
    fuses_pairs = True

    def query_dim(self, dim: int) -> int:
        return 2 * dim

    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        offset, scale = query.chunk(2, dim=-1)
        return -autograd_functions.ScaledManhattan.apply(offset, scale, unit_rows(candidates))

    compare_fused = Comparator.compare_plainly

    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        offset, scale = query.chunk(2, dim=-1)
        return -(offset - scale * unit_rows(candidates)).abs().sum(-1)

    def rounding_bound(self, query: Tensor, max_candidate_norm: float, true_scores: Tensor) -> Tensor:
        """Return (D + 8) u t + 2 u sum|a| + (D + 14) u |s|.

        The rounding of a and s and the product are each u of a term of a sum that is at most sum|a| or, as
        the row has norm 1, |s|; that of the unit row is (D + 8) u; the sum itself is relative to the
        distance t.
        """
        offset, scale = query.chunk(2, dim=-1)
        dim = offset.shape[1]
        lengths = scale.norm(dim=1)
        rounded = 2 * offset.abs().sum(1) + (dim + 14) * lengths
        bound = SAFE_UNIT * ((dim + 8) * -true_scores + rounded) + dim * comparators.TINY_MODULUS_PER_DIM
        # The candidates' norm counts: beyond float32's range a row has no direction.
        magnitude = (offset.norm(dim=1) + lengths).square() * dim + max_candidate_norm**2
        return unless_overflow(bound, magnitude)


class ProjectedDistance(Comparator):
    """-|q - c M|: a query is [q, the D rows of a matrix M], (..., D + D D)."""

    memory_passes = 0
    norm: ClassVar[int] = 2
    """1: Manhattan, 2: Euclidean."""

    def query_dim(self, dim: int) -> int:
        return dim + dim * dim

    def operations(self, dim: int) -> float:
        """Return those of a row and a matrix, divided by the numbers of a score, the block's twice."""
        # A training step has 3 matmuls on each side; blocks are scored once more for their gradients.
        return 2 * dim * 4 / 3

    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Score every pair, in blocks: one matmul projects candidates by the matrices of several queries."""
        return -autograd_functions.ByBlocks.apply(self._distances, None, query, candidates)

    def _distances(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Return the distances (b, n) of a block."""
        num, dim = len(query), candidates.shape[1]
        matrices = query[:, dim:].unflatten(-1, (dim, dim))
        projected = candidates @ matrices.transpose(0, 1).reshape(dim, num * dim)
        differences = projected.view(len(candidates), num, dim) - query[:, :dim]
        return torch.linalg.vector_norm(differences, ord=self.norm, dim=-1).T

    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        dim = candidates.shape[-1]
        matrices = query[..., dim:].unflatten(-1, (dim, dim))
        # einsum broadcasts dimensions of size 1 without a copy of the matrices for each pair.
        differences = query[..., :dim] - torch.einsum("...i,...ij->...j", candidates, matrices)
        return -torch.linalg.vector_norm(differences, ord=self.norm, dim=-1)

    def rounding_bound(self, query: Tensor, max_candidate_norm: float, true_scores: Tensor) -> Tensor:
        """Return (D + 8) u t + e: e bounds the error of q - c M, as a vector.

        Its Euclidean norm is at most u |q| + (D + 2) u |c| |M|, with |M| the Frobenius norm, by Cauchy and
        Schwarz for each column; its Manhattan norm is at most sqrt(D) times that.
        """
        dim = (math.isqrt(1 + 4 * query.shape[1]) - 1) // 2
        point, matrix = query[:, :dim].norm(dim=1), query[:, dim:].norm(dim=1)
        error = 2 * point + (dim + 4) * max_candidate_norm * matrix
        factor = math.sqrt(dim) if self.norm == 1 else 1.0
        bound = SAFE_UNIT * (factor * error + (dim + 8) * -true_scores)
        # Only the Euclidean norm squares.
        magnitude = (point + max_candidate_norm * matrix).pow(self.norm) * dim
        return unless_overflow(bound + dim * comparators.TINY_MODULUS_PER_DIM, magnitude)


@SCORE_FUNCTIONS.register("pairre")
class PairRE(ScaledL1, ScoreFunction):
    """PairRE, -sum_k |h_k r_k / |h| - t_k r'_k / |t|| (Chao et al. 2021, eq. 2).

    A relation's row is [r, r']. Entities have norm 1, which the paper demands as a constraint and its
    program by dividing, as here.
    """

    help = "a scaling of unit heads and one of unit tails by the relation (Chao et al. 2021)"
    # Of a relation's row, each as wide as an entity's; between the two scalings there may be a translation.
    num_parts: ClassVar[int] = 2

    def relation_dim(self, dim: int) -> int:
        return self.num_parts * dim

    def initial_relations(self, drawn: Tensor, dim: int) -> Tensor:
        head_scale, *translation, tail_scale = drawn.chunk(self.num_parts, dim=-1)
        return torch.cat([head_scale + 1, *translation, tail_scale + 1], dim=-1)

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        head_scale, *translation, tail_scale = relation.chunk(self.num_parts, dim=-1)
        return _joined(sum(translation, unit_rows(entity) * head_scale), tail_scale)

    def adjoint(self, relation: Tensor) -> Tensor:
        """Return [r', r], or [r', -m, r]: a distance is symmetric."""
        head_scale, *translation, tail_scale = relation.chunk(self.num_parts, dim=-1)
        return torch.cat([tail_scale, *(-part for part in translation), head_scale], dim=-1)


@SCORE_FUNCTIONS.register("triplere")
class TripleRE(PairRE):
    """TripleRE, -sum_k |h_k r_k / |h| - t_k r'_k / |t| + m_k| (Yu et al. 2022, first version).

    A relation's row is [r, m, r']. Entities have norm 1. The scalings start near 1, so that it is also the
    paper's second version, with (r_k + u) and (r'_k + u), at u = 1.
    """

    help = "PairRE with a translation between the scaled entities (Yu et al. 2022)"
    num_parts = 3


def _joined(query: Tensor, candidate_part: Tensor) -> Tensor:
    """Put the two parts of queries together; their leading dimensions broadcast."""
    shape = torch.broadcast_shapes(query.shape[:-1], candidate_part.shape[:-1])
    parts = [part.expand(*shape, part.shape[-1]) for part in (query, candidate_part)]
    return torch.cat(parts, dim=-1)


class _Projection(ProjectedDistance, ScoreFunction):
    """h M + r, compared with t M: a relation's row is [r, the D rows of the matrix M], D + D D numbers."""

    wide_queries = True

    def relation_dim(self, dim: int) -> int:
        return dim + dim * dim

    def initial_relations(self, drawn: Tensor, dim: int) -> Tensor:
        """Return translations as drawn, and identities (Lin et al. 2015, section 4.1)."""
        identities = torch.eye(dim).reshape(1, -1).expand(len(drawn), -1)
        return torch.cat([drawn[:, :dim], identities], dim=1)

    @staticmethod
    def entity_dim(relation_dim: int) -> int:
        """Return D, given D + D D."""
        return (math.isqrt(1 + 4 * relation_dim) - 1) // 2

    def penalized(self, relation: Tensor) -> Tensor:
        """Return the translation: a penalty on all numbers of the matrix would pull it off the identity."""
        return relation[..., : self.entity_dim(relation.shape[-1])]

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        dim = entity.shape[-1]
        translation, matrix = relation[..., :dim], relation[..., dim:]
        projected = torch.einsum("...i,...ij->...j", entity, matrix.unflatten(-1, (dim, dim)))
        return _joined(projected + translation, matrix)

    def adjoint(self, relation: Tensor) -> Tensor:
        """Return [-r, M]: |h M + r - t M| = |t M - r - h M|."""
        dim = self.entity_dim(relation.shape[-1])
        return torch.cat([-relation[..., :dim], relation[..., dim:]], dim=-1)

    def compare_relations(self, query: Tensor, relations: Tensor) -> Tensor:
        """Score every pair of entities with every relation: |(h - t) M + r|, memory for (B, N, D) numbers."""
        anchor, answer = query.chunk(2, dim=-1)
        dim = anchor.shape[-1]
        point = self.operate((anchor - answer).unsqueeze(1), relations.unsqueeze(0))[..., :dim]
        return -torch.linalg.vector_norm(point, ord=self.norm, dim=-1)


@SCORE_FUNCTIONS.register("transr")
class TransR(_Projection):
    """TransR, -|h M + r - t M|, Euclidean (Lin et al. 2015, eq. 8, without its square)."""

    help = "TransE of entities that a matrix of the relation projects (Lin et al. 2015)"


@SCORE_FUNCTIONS.register("transr_l1")
class TransRL1(_Projection):
    """TransR, -sum|h M + r - t M| (Lin et al. 2015, with the Manhattan distance, as DGL-KE's)."""

    help = "TransR with the Manhattan distance (as DGL-KE's)"
    norm = 1
