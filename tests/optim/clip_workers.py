"""What the trainers of a test cluster do with clipped gradients and rules of groups."""

from __future__ import annotations

from typing import Any

from dglkge import optim
from dglkge.optim.rules import Adagrad
from tests.optim.workers import barrier, make_table, rank_and_size, read, train_by_rows


def clipped(graph: Any, arguments: dict[str, Any]) -> list[Any]:
    """Train two tables, the second with a rule of its own, with both limits; returns the rows."""
    rank, _ = rank_and_size()
    tables = [make_table(graph, ntype, dim, f"clipped_{ntype}") for ntype, dim in arguments["tables"]]
    groups = [{"params": tables[:1]}, {"params": tables[1:], "rule": Adagrad(), "lr": 0.05}]
    optimizer = optim.RowAdagrad(groups, lr=0.1, timeout_seconds=60, kernels=["auto", "reference"][rank % 2])
    optimizer.clip_gradients(arguments["norm"], arguments["value"])
    for step in range(arguments["num_steps"]):
        train_by_rows(optimizer, tables, step)
    barrier()
    rows = [read(table) for table in tables]
    barrier()
    return rows
