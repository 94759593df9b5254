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
        """Return some of the machine's rows as float32."""
        return widen(self.local_rows, places)


class Machines:
    """All rows of all tables, and the tables as each machine sees them."""

    def __init__(self, num_machines: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.starts = {}, {}
        for name, (sizes, dim) in SIZES.items():
            sizes = (sum(sizes[: 4 - num_machines]), *sizes[4 - num_machines :])
            self.starts[name] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            self.rows[name] = torch.randn(int(self.starts[name][-1]), dim, generator=generator)

    def tables(self, machine: int) -> dict[str, Any]:
        """Return the tables of a machine."""
        return {name: MemoryTable(rows, self.starts[name], machine) for name, rows in self.rows.items()}

    def is_local(self, name: str, ids: torch.Tensor, machine: int) -> torch.Tensor:
        """Say of each id whether the machine holds its row."""
        return (ids >= self.starts[name][machine]) & (ids < self.starts[name][machine + 1])


def run_trainers(
    machines: Machines,
    machine_of: Sequence[int],
    trainer: Callable[[int, int, ExchangeLookup, Threads], Any],
    wire_dtype: torch.dtype = torch.float32,
    staleness: int = 0,
) -> list[Any]:
    """Run ``trainer(rank, machine, lookup, threads)`` in a thread for each rank; returns what each returned.

    The lookups have a group of their own; ``threads`` is another, for the trainers themselves.
    """
    shared, trainer_threads = Threads(len(machine_of)), Threads(len(machine_of))

    def run(rank: int) -> Any:
        tables = machines.tables(machine_of[rank])
        group: Any = ThreadGroup(shared, rank)
        exchange = RowExchange(group, machine_of[rank], list(tables.values()), wire_dtype)
        try:
            lookup = ExchangeLookup(tables, exchange, staleness)
            return trainer(rank, machine_of[rank], lookup, trainer_threads)
        except BaseException:
            trainer_threads.barrier.abort()
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
        expected[name] = torch.where(local, machines.rows[name][ids], rows[name][ids].to(wire_dtype).float())
    return expected


def assert_rows(got: Mapping[str, FoundRows], expected: dict[str, torch.Tensor]) -> None:
    """Hold two lookups equal, bit by bit."""
    assert got.keys() == expected.keys()
    for name, rows in expected.items():
        torch.testing.assert_close(got[name].copied(), rows, rtol=0, atol=0)


def train(
    machines: Machines,
    rank: int,
    machine: int,
    lookup: ExchangeLookup,
    staleness: int,
    before: dict[str, torch.Tensor],
    updates: bool,
    meet: Callable[[], object],
    num_steps: int = 10,
) -> None:
    """Look rows up ahead; one trainer of those that share the tables updates them, once all have met.

    The oracle keeps the tables as they were before the last update; own rows are always current.
    """
    for step in range(num_steps):
        table_ids = draw(machines, step, rank)
        got = lookup.rows(step, table_ids)
        rows = before if staleness and step else machines.rows
        assert_rows(got, expect(machines, rows, table_ids, machine))
        if step + 1 < num_steps:
            lookup.announce(step + 1, draw(machines, step + 1, rank))
        lookup.before_update()
        meet()  # as the optimizer's exchange: nobody writes before all have come
        for name, rows in machines.rows.items() if updates else ():
            before[name].copy_(rows)
            rows += 1 + step
        meet()


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
