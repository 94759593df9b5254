"""Rows in memory behind the protocols that the evaluation knows rows by."""

from __future__ import annotations

import numpy as np
import torch


class MemoryRows:
    """A RowSource over whole tables."""

    def __init__(self, tables: dict[str, torch.Tensor]) -> None:
        self.tables = tables

    def gather(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return rows by original id."""
        return self.tables[table][ids]


class MemoryShard:
    """A RowShard: some rows of a table in any order."""

    def __init__(self, table: torch.Tensor, ids: torch.Tensor) -> None:
        self.original_ids = ids
        self.rows = table[ids]
        self._place = torch.full((len(table),), -1)
        self._place[ids] = torch.arange(len(ids))

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        """Return where the ids lie, -1 where they do not."""
        return self._place[ids]


def split_rows(table: torch.Tensor, num_shards: int, seed: int = 0) -> list[MemoryShard]:
    """Deal a table's rows out to shards at random; some may get none."""
    random = np.random.default_rng(seed)
    owner = random.integers(num_shards, size=len(table))
    order = random.permutation(len(table))
    return [MemoryShard(table, torch.from_numpy(order[owner[order] == shard])) for shard in range(num_shards)]
