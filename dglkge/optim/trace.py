"""What a ``DistEmbedding`` recorded: which rows were read, and the gradients that arrived for them.

DGL appends (ids, rows) to a list of the embedding whenever rows are read while gradients are recorded. Here
these rules hold: a step takes every pair that has its gradient and forgets it; a pair whose backward has not
run yet is remembered as long as its rows live (and not a moment longer), so that rows read ahead of a step
still count; ``zero_grad`` forgets the gradients that have arrived, and keeps the pairs that still wait for
theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import TensorWeakRef


class Trace:
    """The recorded reads of one embedding.

    Parameters
    ----------
    embedding : dgl.distributed.DistEmbedding
        The embedding.
    """

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding
        self._waiting: list[tuple[torch.Tensor, TensorWeakRef]] = []

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """All pairs (ids, rows) that may have or get a gradient."""
        alive = [(ids, reference()) for ids, reference in self._waiting]
        return [(ids, rows) for ids, rows in alive if rows is not None] + list(self._embedding._trace)

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The pairs (ids "(n,)", gradients "(n, D)") that arrived since the last call; they are forgotten."""
        pairs = self._pairs()
        self._waiting = [(ids, TensorWeakRef(rows)) for ids, rows in pairs if rows.grad is None]
        self._embedding.reset_trace()
        return [(ids, rows.grad) for ids, rows in pairs if rows.grad is not None]

    def gradients(self) -> list[torch.Tensor]:
        """The gradients "(n, D)" that have arrived and that no step has taken yet."""
        return [rows.grad for _, rows in self._pairs() if rows.grad is not None]

    def drop_gradients(self) -> None:
        """Forget the gradients that have arrived."""
        pairs = [(ids, rows) for ids, rows in self._pairs() if rows.grad is None]
        self._waiting = []
        self._embedding.reset_trace()
        self._embedding._trace.extend(pairs)
