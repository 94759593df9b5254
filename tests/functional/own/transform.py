"""A row transform of a user, in a file of its own: batches train rows of entities without their mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field

from dglkge.model.choices import ROW_TRANSFORMS, TransformChoice, TransformSettings
from dglkge.typing import RELATION


class CenterSettings(TransformSettings):
    """Its options."""

    share: float = Field(1.0, ge=0, le=1)
    """share of the mean that is subtracted."""


class Center:
    """x - share mean(x)."""

    def __init__(self, settings: CenterSettings, original_ids: Mapping[str, torch.Tensor], seed: int) -> None:
        self.tables = [name for name in original_ids if name != RELATION]
        self._share = settings.share

    def start_batch(self, number: int) -> None:
        """Do nothing: it is the same in every batch."""

    def forward(self, table: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Change the rows."""
        rows -= self._share * rows.mean(1, keepdim=True)

    def backward(self, table: str, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        """Change the gradients: the matrix is symmetric."""
        gradients -= self._share * gradients.mean(1, keepdim=True)


ROW_TRANSFORMS.register("center")(TransformChoice("rows without their mean", Center, CenterSettings))
