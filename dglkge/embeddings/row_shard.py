"""Rows that this trainer scores queries against."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TableShard:
    """A contiguous range of node ids of one live table.

    Attributes
    ----------
    first_node_id : int
        Node id of the first row.
    rows : (n, D) tensor
        A view on the machine's shared memory.
    original_ids : (n,) int64 tensor
        Original id of each row.
    node_ids : (N,) int64 tensor
        Node id of every original id of the table.
    """

    first_node_id: int
    rows: torch.Tensor
    original_ids: torch.Tensor
    node_ids: torch.Tensor

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the row of each original id (m,), -1 where another shard holds it."""
        place = self.node_ids[ids] - self.first_node_id
        place[(place < 0) | (place >= self.rows.shape[0])] = -1
        return place
