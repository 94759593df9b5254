"""Score functions whose relations change both entities before they are compared: PairRE, TripleRE, TransR.

Their comparators are in :mod:`.projected_comparators`: what a relation does to the candidates is the second
part of a query.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dglkge.model.functions.comparators import unit_rows
from dglkge.model.functions.projected_comparators import ProjectedDistance, ScaledL1
from dglkge.model.score_functions import SCORE_FUNCTIONS, ScoreFunction
from dglkge.registry import deferred

if TYPE_CHECKING:
    import torch
else:
    torch = deferred("torch")


@SCORE_FUNCTIONS.register("pairre")
class PairRE(ScaledL1, ScoreFunction):
    """PairRE, -sum_k |h_k r_k / |h| - t_k r'_k / |t|| (Chao et al. 2021, eq. 2).

    A relation's row is [r, r']. Entities have norm 1, which the paper demands as a constraint and its
    program by dividing, as here.
    """

    help = "a scaling of unit heads and one of unit tails by the relation (Chao et al. 2021)"

    def relation_dim(self, dim: int) -> int:
        """Return the width of two scalings."""
        return 2 * dim

    def initial_relations(self, drawn: torch.Tensor, dim: int) -> torch.Tensor:
        """Return scalings near 1."""
        return drawn + 1

    def operate(self, entity: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
        """Return [h r / |h|, r']."""
        of_head, of_tail = relation.chunk(2, dim=-1)
        return _joined(unit_rows(entity) * of_head, of_tail)

    def adjoint(self, relation: torch.Tensor) -> torch.Tensor:
        """Return [r', r]: a distance is symmetric."""
        of_head, of_tail = relation.chunk(2, dim=-1)
        return torch.cat([of_tail, of_head], dim=-1)


@SCORE_FUNCTIONS.register("triplere")
class TripleRE(ScaledL1, ScoreFunction):
    """TripleRE, -sum_k |h_k r_k / |h| - t_k r'_k / |t| + m_k| (Yu et al. 2022, first version).

    A relation's row is [r, m, r']. Entities have norm 1. The scalings start near 1, so that it is also the
    paper's second version, with (r_k + u) and (r'_k + u), at u = 1.
    """

    help = "PairRE with a translation between the scaled entities (Yu et al. 2022)"

    def relation_dim(self, dim: int) -> int:
        """Return the width of two scalings and a translation."""
        return 3 * dim

    def initial_relations(self, drawn: torch.Tensor, dim: int) -> torch.Tensor:
        """Return scalings near 1 and translations as drawn."""
        of_head, translation, of_tail = drawn.chunk(3, dim=-1)
        return torch.cat([of_head + 1, translation, of_tail + 1], dim=-1)

    def operate(self, entity: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
        """Return [h r / |h| + m, r']."""
        of_head, translation, of_tail = relation.chunk(3, dim=-1)
        return _joined(unit_rows(entity) * of_head + translation, of_tail)

    def adjoint(self, relation: torch.Tensor) -> torch.Tensor:
        """Return [r', -m, r]."""
        of_head, translation, of_tail = relation.chunk(3, dim=-1)
        return torch.cat([of_tail, -translation, of_head], dim=-1)


def _joined(query: torch.Tensor, of_candidates: torch.Tensor) -> torch.Tensor:
    """Put the two parts of queries together; their leading dimensions broadcast."""
    shape = torch.broadcast_shapes(query.shape[:-1], of_candidates.shape[:-1])
    parts = [part.expand(*shape, part.shape[-1]) for part in (query, of_candidates)]
    return torch.cat(parts, dim=-1)


class _Projection(ProjectedDistance, ScoreFunction):
    """h M + r, compared with t M: a relation's row is [r, the D rows of the matrix M], D + D D numbers."""

    wide_queries = True

    def relation_dim(self, dim: int) -> int:
        """Return the size of a vector and a matrix."""
        return dim + dim * dim

    def initial_relations(self, drawn: torch.Tensor, dim: int) -> torch.Tensor:
        """Return translations as drawn, and identities (Lin et al. 2015, section 4.1)."""
        identities = torch.eye(dim).reshape(1, -1).expand(len(drawn), -1)
        return torch.cat([drawn[:, :dim], identities], dim=1)

    @staticmethod
    def entity_dim(relation_dim: int) -> int:
        """Return D, given D + D D."""
        return (math.isqrt(1 + 4 * relation_dim) - 1) // 2

    def penalized(self, relation: torch.Tensor) -> torch.Tensor:
        """Return the translation: a penalty on all numbers of the matrix would pull it off the identity."""
        return relation[..., : self.entity_dim(relation.shape[-1])]

    def operate(self, entity: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
        """Return [h M + r, M]."""
        dim = entity.shape[-1]
        translation, matrix = relation[..., :dim], relation[..., dim:]
        projected = torch.einsum("...i,...ij->...j", entity, matrix.unflatten(-1, (dim, dim)))
        return _joined(projected + translation, matrix)

    def adjoint(self, relation: torch.Tensor) -> torch.Tensor:
        """Return [-r, M]: |h M + r - t M| = |t M - r - h M|."""
        dim = self.entity_dim(relation.shape[-1])
        return torch.cat([-relation[..., :dim], relation[..., dim:]], dim=-1)

    def compare_relations(self, query: torch.Tensor, relations: torch.Tensor) -> torch.Tensor:
        """Score every pair of entities with every relation: |(h - t) M + r|, memory for (B, N, D) numbers."""
        given, answer = query.chunk(2, dim=-1)
        dim = given.shape[-1]
        point = self.operate((given - answer).unsqueeze(1), relations.unsqueeze(0))[..., :dim]
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
