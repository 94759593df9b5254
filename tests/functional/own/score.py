"""A score function of a user, in a file of its own.

The relation's row is half as wide as an entity's: each number scales two numbers of the entity.
"""

from __future__ import annotations

import torch

from dglkge.model.functions.comparators import Dot
from dglkge.model.score_functions import SCORE_FUNCTIONS, ScoreFunction


@SCORE_FUNCTIONS.register("pairwise_scale")
class PairwiseScale(Dot, ScoreFunction):
    """sum_k h_k t_k r_(k // 2)."""

    help = "product with one number of the relation for two of the entities"

    def relation_dim(self, dim: int) -> int:
        """Return one number for each pair of numbers of an entity."""
        return dim // 2

    def operate(self, entity: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
        """Scale the pairs."""
        return entity * relation.repeat_interleave(2, dim=-1)

    def adjoint(self, relation: torch.Tensor) -> torch.Tensor:
        """Return r: the score is symmetric in head and tail."""
        return relation
