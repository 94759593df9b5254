"""Tables of several machines in one process, and threads that play their trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from dglkge.embeddings.row_exchange import RowExchange
from dglkge.embeddings.row_lookup import ExchangeLookup, FoundRows
from dglkge.optim.narrow_rows import widen
from tests.optim.test_exchanges import ThreadGroup, Threads

SIZES = {"entity": ((40, 7, 33), 5), "town": ((3, 0, 9), 2), "relation": ((1, 6, 2), 8)}
"""Of each table: rows on each of three machines, and its width."""


class MemoryTable:
    """The rows of one table as one machine sees them: its own are a view on all."""

    def __init__(self, rows: torch.Tensor, starts: np.ndarray, machine: int) -> None:
        self.dim = rows.shape[1]
        self.range_starts = starts
        self.first_node_id, self.end_node_id = int(starts[machine]), int(starts[machine + 1])
        self.local_rows = rows[self.first_node_id : self.end_node_id]

    def __len__(self) -> int:
        return int(self.range_starts[-1])

    def widened(self, places: np.ndarray) -> torch.Tensor:
        return widen(self.local_rows, places)


class Machines:
    """All rows of all tables, and the tables as each machine sees them."""

    def __init__(self, num_machines: int, narrow: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows, self.starts = {}, {}
        for name, (sizes, dim) in SIZES.items():
            sizes = (sum(sizes[: 4 - num_machines]), *sizes[4 - num_machines :])
            self.starts[name] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            rows = torch.randn(int(self.starts[name][-1]), dim, generator=generator)
            self.rows[name] = rows if name == "relation" else rows.to(narrow)

    def tables(self, machine: int) -> dict[str, Any]:
        return {name: MemoryTable(rows, self.starts[name], machine) for name, rows in self.rows.items()}

    def is_local(self, name: str, ids: torch.Tensor, machine: int) -> torch.Tensor:
        return (ids >= self.starts[name][machine]) & (ids < self.starts[name][machine + 1])


def run_trainers(
    machines: Machines,
    machine_of: Sequence[int],
    trainer: Callable[[int, int, ExchangeLookup], Any],
    wire_dtype: torch.dtype = torch.float32,
    staleness: int = 0,
) -> list[Any]:
    """Run ``trainer(rank, machine, lookup)`` in a thread for each rank; returns what each returned."""
    shared = Threads(len(machine_of))

    def run(rank: int) -> Any:
        tables = machines.tables(machine_of[rank])
        group: Any = ThreadGroup(shared, rank)
        exchange = RowExchange(group, machine_of[rank], list(tables.values()), wire_dtype)
        try:
            lookup = ExchangeLookup(tables, exchange, staleness)
            return trainer(rank, machine_of[rank], lookup)
        except BaseException:
            shared.barrier.abort()
            raise

    with ThreadPoolExecutor(len(machine_of)) as pool:
        return list(pool.map(run, range(len(machine_of))))


def expect(
    machines: Machines,
    rows: dict[str, torch.Tensor],
    table_ids: dict[str, torch.Tensor],
    machine: int,
    wire_dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Rows as the trainer of a machine should see them: those of others as ``rows`` has them, narrowed."""
    expected = {}
    for name, ids in table_ids.items():
        local = machines.is_local(name, ids, machine)[:, None]
        remote = rows[name][ids].to(wire_dtype).float()
        expected[name] = torch.where(local, machines.rows[name][ids].float(), remote)
    return expected


def assert_rows(got: Mapping[str, FoundRows], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, rows in expected.items():
        torch.testing.assert_close(got[name].copied(), rows, rtol=0, atol=0)


def draw(machines: Machines, step: int, rank: int) -> dict[str, torch.Tensor]:
    """Return what a trainer wants in a step: repeated ids, sometimes none, sometimes a table not at all."""
    random = np.random.default_rng((step, rank))
    table_ids = {}
    for place, (name, rows) in enumerate(machines.rows.items()):
        turn = (step + rank + place) % 5
        if turn == 4:
            continue
        table_ids[name] = torch.from_numpy(random.integers(0, len(rows), 30 * turn))
    return table_ids
