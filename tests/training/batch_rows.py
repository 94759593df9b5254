"""Batches by an objective of its own, on tables in memory."""

from __future__ import annotations

from typing import Any

import torch

from dglkge.embeddings.row_lookup import DirectLookup
from dglkge.step.contracts import Gradients
from dglkge.step.planning import Plan
from dglkge.step.rows import RowStore


class MemoryTables(dict[str, Any]):
    """Tables by name, whose rows are found directly."""

    @property
    def lookup(self) -> DirectLookup:
        """The lookup of rows."""
        return DirectLookup(self)

    def row_ids(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the ids of rows: here there are no times."""
        return ids


def computed(
    objective: Any, store: RowStore, plan: Plan, fill: float | None = None
) -> tuple[Gradients, dict[str, torch.Tensor]]:
    """Return what an objective finds, and the summed gradients of all rows of the tables, by table.

    ``fill`` is what the memory of gradients holds before.
    """
    rows = store.rows(plan)
    if fill is not None:
        for part in rows.collect():
            part.rows.fill_(fill)
    outcome = objective.gradients(plan, rows)()
    tables = store._tables
    return outcome, {
        part.table: torch.zeros(tables[part.table].local_rows.shape).index_add_(0, part.ids, part.rows)
        for part in rows.collect()
    }
