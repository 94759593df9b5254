"""A score function of a user with a module, in a file of its own: two layers over head and relation."""

from __future__ import annotations

import torch

from dglkge.model.functions.dense import DenseScore
from dglkge.model.score_functions import SCORE_FUNCTIONS


class TwoLayers(torch.nn.Module):
    """h + A tanh(B [h, r])."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(2 * dim, dim), torch.nn.Linear(dim, dim)

    def forward(self, entity: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
        """Return (n, D)."""
        made: torch.Tensor = entity + self.outer(torch.tanh(self.inner(torch.cat([entity, relation], dim=1))))
        return made


@SCORE_FUNCTIONS.register("two_layers")
class TwoLayerScore(DenseScore):
    """<h + A tanh(B [h, r]), t>."""

    help = "a perceptron over head and relation"

    def build_module(self, dim: int, seed: int) -> torch.nn.Module:
        """Return the layers, with torch's own initial values."""
        return TwoLayers(dim)
