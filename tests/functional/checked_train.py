"""The training loop, in which every lookup of rows is compared with what DGL's kvstore pulls."""

from __future__ import annotations

import sys
from typing import Any

import torch

import dglkge


class CheckedLookup:
    """A lookup that asks the kvstore too."""

    def __init__(self, lookup: Any, tables: Any) -> None:
        self._lookup, self._tables = lookup, tables
        self.num_compared = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lookup, name)

    def rows(self, batch: int, table_ids: Any) -> Any:
        rows = self._lookup.rows(batch, table_ids)
        for name, ids in table_ids.items():
            torch.testing.assert_close(rows[name].copied(), self._tables[name].gather(ids), rtol=0, atol=0)
            self.num_compared += len(ids)
        return rows


if __name__ == "__main__":
    config = dglkge.load_config(None, sys.argv[2::2])
    with dglkge.join_cluster(config) as cluster:
        trainer = dglkge.build_trainer(config, cluster)
        assert type(trainer.tables.lookup).__name__ == "ExchangeLookup"
        checked = trainer.tables.lookup = CheckedLookup(trainer.tables.lookup, trainer.tables)
        for _ in dglkge.remaining_epochs_until(config.training.num_epochs):
            for batch in trainer.batches():
                trainer.step(batch)
        trainer.evaluate("test")
        print(f"compared {checked.num_compared} rows")
