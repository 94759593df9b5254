"""A score function of your own: one class in one file.

    dglkge train dataset=data/mine --import examples/own_score_function.py model.score_function=pairwise_scale

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
        """Return the width of a relation's row: one number for two of an entity's."""
        return dim // 2

    def operate(self, entity: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
        """Return the query (h, r, ?), which is compared with tails."""
        return entity * relation.repeat_interleave(2, dim=-1)

    def adjoint(self, relation: torch.Tensor) -> torch.Tensor:
        """Return the row with which a tail asks for heads; this score is symmetric."""
        return relation
