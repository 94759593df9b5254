"""Lookup of rows: in place, copied, from other machines, and asked of DGL's servers ahead of their use."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dglkge.distributed.dgl_compat import dgl
from dglkge.embeddings.row_exchange import RowExchange
from dglkge.embeddings.row_lookup import ExchangeLookup, FoundRows, RequestedLookup
from dglkge.optim.alltoall import Alltoall
from dglkge.optim.narrow_rows import widen
from tests.optim.test_exchanges import ThreadGroup, Threads
from tests.optim.test_shared_messages import in_processes

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
    machines: Machines, machine_of: Sequence[int], trainer: Callable, wire_dtype=torch.float32, staleness=0
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


def expect(machines: Machines, rows: dict, table_ids: dict, machine: int, wire_dtype=torch.float32) -> dict:
    """Rows as the trainer of a machine should see them: those of others as ``rows`` has them, narrowed."""
    expected = {}
    for name, ids in table_ids.items():
        local = machines.is_local(name, ids, machine)[:, None]
        remote = rows[name][ids].to(wire_dtype).float()
        expected[name] = torch.where(local, machines.rows[name][ids].float(), remote)
    return expected


def assert_rows(got: dict[str, FoundRows], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, rows in expected.items():
        torch.testing.assert_close(got[name].copied(), rows, rtol=0, atol=0)


def draw(machines: Machines, step: int, rank: int) -> dict[str, torch.Tensor]:
    """Return what a trainer wants in a step: repeated ids, sometimes none, sometimes a table not at all."""
    random = np.random.default_rng((step, rank))
    table_ids = {}
    for place, (name, rows) in enumerate(machines.rows.items()):
        turn = (step + rank + place) % 5
        if turn != 4:
            table_ids[name] = torch.from_numpy(random.integers(0, len(rows), 30 * turn))
    return table_ids


LAYOUTS = [[0, 1], [0, 0, 1], [2, 1, 0, 0, 2, 1], [0, 0]]  # the machine of each rank

NUM_STEPS = 10
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("layout, wire_dtype", list(zip(LAYOUTS, [FLOAT32, BFLOAT16] * 2)))
@pytest.mark.parametrize("narrow", [FLOAT32, torch.float16])
def test_every_trainer_gets_the_rows_that_it_asks_for(layout, wire_dtype, narrow, ahead):
    wire_dtype = wire_dtype if narrow == FLOAT32 else FLOAT32
    machines = Machines(max(layout) + 1, narrow)

    def trainer(rank: int, machine: int, lookup: ExchangeLookup) -> None:
        for step in range(NUM_STEPS):
            table_ids = draw(machines, step, rank)
            got = lookup.rows(step, table_ids)
            assert_rows(got, expect(machines, machines.rows, table_ids, machine, wire_dtype))
            if ahead and step % 4 != 3:  # what is announced in vain is dropped
                lookup.announce(step + 1, draw(machines, step + 1 if step % 4 else 99, rank))
                if step % 4 == 0:
                    lookup.announce(step + 1, draw(machines, step + 1, rank))

    run_trainers(machines, layout, trainer, wire_dtype)


def test_rows_that_are_still_read_are_not_overwritten_by_those_of_the_next_batch() -> None:
    machines = Machines(2)

    def trainer(rank: int, machine: int, lookup: ExchangeLookup) -> None:
        for step in range(0, NUM_STEPS, 2):
            table_ids = draw(machines, step, rank)
            located = lookup.rows(step, table_ids)
            assert any(len(rows.arrays[1]) for rows in located.values())
            lookup.announce(step + 1, draw(machines, step + 1, rank))
            lookup.finish()  # all that travels ahead has come
            assert_rows(located, expect(machines, machines.rows, table_ids, machine))

    run_trainers(machines, [0, 1], trainer, staleness=1)


@pytest.mark.parametrize("wire_dtype, narrow", [(FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16)])
def test_bytes_to_other_machines_are_counted(wire_dtype: torch.dtype, narrow: torch.dtype) -> None:
    """Distinct ids of four bytes, their rows (of 16 bits padded to 32), and their numbers; no own rows."""
    machines, layout = Machines(2, narrow), [0, 0, 1]

    def trainer(rank: int, machine: int, lookup: ExchangeLookup) -> int:
        lookup.rows(0, draw(machines, 1, rank))
        return lookup.sent_bytes

    sent = sum(run_trainers(machines, layout, trainer, wire_dtype))
    expected = 4 * (len(machines.rows) + 1) * 8  # two trainers with one stranger each, one with two
    for rank, machine in enumerate(layout):
        for name, ids in draw(machines, 1, rank).items():
            away = ids[~machines.is_local(name, ids, machine)].unique()
            rows = machines.rows[name]
            expected += len(away) * (4 + rows.shape[1] * min(wire_dtype.itemsize, rows.itemsize))
    assert 0 <= sent - expected <= (0 if narrow == torch.float32 else 2 * len(layout))


def test_the_trainers_of_a_machine_share_its_answers() -> None:
    machines, threads, nothing = Machines(2), Threads(3), np.empty(0, np.int64)
    first, end = machines.starts["entity"][1:3]

    def trainer(rank: int) -> int:
        group: Any = ThreadGroup(threads, rank)
        machine = [0, 1, 1][rank]
        exchange = RowExchange(group, machine, list(machines.tables(machine).values()), torch.float32)
        ids = np.arange(first, end) if rank == 0 else nothing
        owners = exchange.owners(0, ids)
        by_rank = [ids[owners == owner] for owner in range(3)]
        return int(exchange.exchange_ids([by_rank, [nothing] * 3, [nothing] * 3], 0).to_give.sum())

    with ThreadPoolExecutor(3) as pool:
        num_served = list(pool.map(trainer, range(3)))
    assert num_served == [0, 17, 16]


def test_trainers_at_different_batches_are_told_so() -> None:
    machines = Machines(2)

    def trainer(rank: int, machine: int, lookup: ExchangeLookup) -> None:
        message = rf"lookup of rows: trainers \[{1 - rank}\] are at another batch than this one"
        with pytest.raises(RuntimeError, match=message):
            lookup.rows(3 + rank, draw(machines, 0, rank))

    def ahead(rank: int, machine: int, lookup: ExchangeLookup) -> None:
        """The failure is in the background, and raised at the next lookup."""
        lookup.announce(rank, {})
        lookup.before_update()  # does not wait for ever
        with pytest.raises(RuntimeError, match="another batch"):
            lookup.rows(rank, {})

    run_trainers(machines, [0, 1], trainer)
    run_trainers(machines, [0, 1], ahead, staleness=1)


RNG = np.random.default_rng(5)
LOCAL, REMOTE = (RNG.normal(size=(num, 7)).astype(np.float32) for num in (11, 4))


@pytest.mark.parametrize("places", [[], [0], [10, 3, 3, 0], [-1, -4, 5, -1, 10, -2], [-3]])
def test_rows_of_two_arrays(places: list[int]) -> None:
    located = FoundRows.in_either(LOCAL, REMOTE, np.array(places, np.int64))
    expected = [LOCAL[place] if place >= 0 else REMOTE[-1 - place] for place in places]
    assert np.array_equal(located.copied().numpy(), np.array(expected).reshape(-1, 7))


def test_rows_of_one_array_are_read_when_they_are_copied() -> None:
    places = RNG.integers(0, 11, 40)
    assert np.array_equal(FoundRows.in_array(LOCAL, places).copied().numpy(), LOCAL[places])
    assert np.array_equal(FoundRows.in_array(LOCAL).copied().numpy(), LOCAL)
    room = torch.full((3, 7), torch.nan)
    assert FoundRows.in_array(LOCAL).part(slice(2, 5)).copied(room) is room
    assert np.array_equal(room.numpy(), LOCAL[2:5])
    rows = LOCAL.copy()
    located = FoundRows.in_array(rows, np.array([4]))
    rows[4] = 2
    assert located.copied().tolist() == [[2.0] * 7]
    # Arrays are kept alive.
    rows = np.full((50_000, 7), 3, np.float32)
    located = FoundRows.in_array(rows, np.array([49_999])).part(slice(None))
    del rows
    gc.collect()
    assert located.copied().tolist() == [[3.0] * 7]


AHEAD = 3


class Servers:
    """DGL's servers: read rows when they are asked, and answer in any order."""

    def __init__(self, machines: Machines) -> None:
        self.machines, self.num_asked, self._random = machines, 0, np.random.default_rng(3)
        self.answers: list[Any] = []

    def ask(self, requests: list[tuple[int, Any]]) -> dict[int, int]:
        places = {}
        for place, (machine, request) in enumerate(requests):
            ids, name = request.id_tensor, request.name
            assert self.machines.is_local(name, ids, machine).all() and len(ids.unique()) == len(ids) > 0
            self.num_asked += len(ids)
            self.answers.append((len(self.answers), self.machines.rows[name][ids]))
            places[len(self.answers) - 1] = place
        return places

    def deserialize(self, kind: object, message: object, rows: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(data_tensor=rows)

    def answer(self) -> Any:
        waiting = [place for place, answer in enumerate(self.answers) if answer is not None]
        place = self._random.choice(waiting)
        number, rows = self.answers[place]
        self.answers[place] = None
        return SimpleNamespace(msg_seq=number, data=None, tensors=rows)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers(Machines(3))
    monkeypatch.setattr(dgl.distributed.rpc, "send_requests_to_machine", made.ask)
    monkeypatch.setattr(dgl.distributed.rpc, "recv_rpc_message", made.answer)
    monkeypatch.setattr(dgl.distributed.rpc, "deserialize_from_payload", made.deserialize)
    return made


@pytest.mark.parametrize("machine", [0, 1, 2])
def test_remote_rows_are_those_of_the_request_and_own_rows_of_now(servers: Servers, machine: int) -> None:
    """The oracle keeps all tables as they were at each step; a batch is asked for three steps before."""
    machines, seen, asked_at = servers.machines, [], {}
    tables, away = machines.tables(machine), 0
    for name, table in tables.items():
        table.embedding = SimpleNamespace(_tensor=SimpleNamespace(_name=name))
        table.typed = lambda rows: rows
    lookup = RequestedLookup(tables, AHEAD)
    for step in range(12):
        seen.append({name: rows.clone() for name, rows in machines.rows.items()})
        table_ids = draw(machines, step, machine)
        located = lookup.rows(step, table_ids)
        assert located.keys() == table_ids.keys()
        for name, ids in table_ids.items():
            local = machines.is_local(name, ids, machine)[:, None]
            then = seen[asked_at.get(step, step)][name]
            expected = torch.where(local, machines.rows[name][ids], then[ids])
            assert torch.equal(located[name].copied(), expected)
            away += len(ids[~local[:, 0]].unique())
        for number in range(step + 1, step + 1 + AHEAD):
            if number not in asked_at:
                lookup.announce(number, draw(machines, number, machine))
                asked_at[number] = step
        if step == 6:  # as before a commit: nothing is on its way, and what comes next is asked for anew
            lookup.finish()
            assert all(answer is None for answer in servers.answers)
            away = servers.num_asked
            asked_at = {}
        for rows in machines.rows.values():
            rows += 1 + step
    lookup.finish()
    assert servers.num_asked >= away > 0


MACHINE_OF = [0, 1, 1]


def make_lookup(machines: Machines, rank: int, staleness: int, timeout_seconds: float = 60) -> ExchangeLookup:
    group = Alltoall(timeout_seconds, own_group=True, purpose="lookup of rows", duty="train every batch")
    tables: dict[str, Any] = machines.tables(MACHINE_OF[rank])
    exchange = RowExchange(group, MACHINE_OF[rank], list(tables.values()), torch.float32)
    return ExchangeLookup(tables, exchange, staleness)


def train(rank: int, machines: Machines, staleness: int) -> None:
    """Look rows up ahead while sums run in the default group; the oracle is a copy of the tables before."""
    lookup = make_lookup(machines, rank, staleness)
    before = {name: rows.clone() for name, rows in machines.rows.items()}
    for step in range(30):
        table_ids = draw(machines, step, rank)
        rows = before if staleness and step else machines.rows
        assert_rows(lookup.rows(step, table_ids), expect(machines, rows, table_ids, MACHINE_OF[rank]))
        if step < 29:
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


@pytest.mark.parametrize("work, staleness", [(train, 0), (train, 1), (leave_early, 1)])
def test_processes_exchange_rows_over_gloo(tmp_path: Path, work: Any, staleness: int) -> None:
    answers = in_processes(tmp_path, lambda rank: work(rank, Machines(2), staleness))
    assert answers == [None, None, None if work is train else "no answer"]
