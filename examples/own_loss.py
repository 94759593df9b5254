"""A loss of your own, with an option: one class in one file.

dglkge train dataset=data/mine --import examples/own_loss.py loss='{name: steep, slope: 2}'
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch.nn import functional

from dglkge.model.losses import LOSSES, LossSettings, PointwiseLoss


@LOSSES.register("steep")
class Steep(PointwiseLoss):
    """softplus(-a p) + mean_j softplus(a n_j)."""

    help = "binary cross entropy of scores times a slope"

    class Settings(LossSettings):
        """Options of `loss` in the configuration."""

        slope: float = Field(1.0, gt=0)
        """factor on scores."""

    def true(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the loss of true answers."""
        return functional.softplus(-self.settings.slope * scores)

    def false(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the loss of negatives."""
        return functional.softplus(self.settings.slope * scores)
