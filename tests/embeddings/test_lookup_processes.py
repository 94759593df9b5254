"""The exchange among real processes over gloo, while the default group communicates too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dglkge.embeddings.row_exchange import RowExchange
from dglkge.embeddings.row_lookup import ExchangeLookup
from dglkge.optim.alltoall import Alltoall
from tests.embeddings.memory_tables import Machines, assert_rows, draw, expect
from tests.simulated_machines import forked

MACHINE_OF = [0, 1, 1]
NUM_STEPS = 30
LIMIT_SECONDS = 100


def make_lookup(machines: Machines, rank: int, staleness: int, timeout_seconds: float = 60) -> ExchangeLookup:
    group = Alltoall(timeout_seconds, own_group=True, purpose="lookup of rows", duty="train every batch")
    tables: dict[str, Any] = machines.tables(MACHINE_OF[rank])
    exchange = RowExchange(group, MACHINE_OF[rank], list(tables.values()), torch.float32)
    return ExchangeLookup(tables, exchange, staleness)


def train(rank: int, machines: Machines, staleness: int) -> None:
    """Look rows up ahead while sums run in the default group; every process updates its own copy.

    The oracle keeps the tables as they were before the last update; own rows are always current.
    """
    lookup = make_lookup(machines, rank, staleness)
    before = {name: rows.clone() for name, rows in machines.rows.items()}
    for step in range(NUM_STEPS):
        table_ids = draw(machines, step, rank)
        rows = before if staleness and step else machines.rows
        assert_rows(lookup.rows(step, table_ids), expect(machines, rows, table_ids, MACHINE_OF[rank]))
        if step + 1 < NUM_STEPS:
            lookup.announce(step + 1, draw(machines, step + 1, rank))
        lookup.before_update()
        total = torch.ones(100)
        dist.all_reduce(total)  # as the optimizer's exchange: nobody writes before all have come
        assert (total == len(MACHINE_OF)).all()
        for name, rows in machines.rows.items():
            before[name].copy_(rows)
            rows += 1 + step
        dist.barrier()


def leave_early(rank: int, machines: Machines, _: int) -> None:
    """Rank 2 ends without a word; the others say who is missing, in the foreground and in the background."""
    lookup = make_lookup(machines, rank, 1, timeout_seconds=20)
    lookup.rows(0, draw(machines, 0, rank))
    if rank == 2:
        os._exit(0)
    lookup.announce(1, draw(machines, 1, rank))
    lookup.before_update()
    with pytest.raises((ConnectionError, TimeoutError), match="lookup of rows: .*trainer"):
        lookup.rows(1, draw(machines, 1, rank))


def be(rank: int, folder: str, work: Any, staleness: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(MACHINE_OF)
    )
    work(rank, Machines(2), staleness)
    os._exit(0)  # those whose peer is gone cannot take leave of it


@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.parametrize("work, staleness", [(train, 0), (train, 1), (leave_early, 1)])
def test_processes(tmp_path: Path, work: Any, staleness: int) -> None:
    processes = [forked(be, rank, str(tmp_path), work, staleness) for rank in range(len(MACHINE_OF))]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert [process.exitcode for process in processes] == [0] * len(MACHINE_OF)
