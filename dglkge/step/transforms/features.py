"""Projected features of entities: the row of an entity e with vector x is scored as e + f(x)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dglkge.model.projections import ProjectedFeatures
from dglkge.step.contracts import RowTransform


class AddedFeatures(RowTransform):
    """Adds projected features to rows.

    Gradients of the projections are left with their parameters.

    Parameters
    ----------
    features : ProjectedFeatures
    original_ids : mapping of str to (n,) int64 tensor
        By table: original id of each node id.
    """

    def __init__(self, features: ProjectedFeatures, original_ids: Mapping[str, torch.Tensor]) -> None:
        self._features = features
        self._original_ids = original_ids

    def start_batch(self, number: int) -> None:
        """Do nothing: the projections are parameters of the run."""

    def forward(self, table: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Add the projected features."""
        rows += self._features.rows(table, self._original_ids[table][ids])

    def backward(self, table: str, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        """Add the gradients of the projections: those of e + f(x) are those of f(x), and of e."""
        if len(ids):
            self._features.backward(table, self._original_ids[table][ids], gradients)
