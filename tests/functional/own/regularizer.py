"""A regularizer of a user, in a file of its own."""

from __future__ import annotations

import torch

from dglkge.model.regularizers import REGULARIZERS, Regularizer


@REGULARIZERS.register("fourth")
class Fourth(Regularizer):
    """Sum of fourth powers."""

    help = "sum of x^4"

    def penalty(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the penalty of each row."""
        return rows.pow(4).sum(-1)
