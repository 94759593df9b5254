"""Lookup of rows: in place, copied, from other machines, and asked of DGL's servers ahead of their use."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.distributed.dgl_compat import dgl
from dglkge.embeddings.row_exchange import RowExchange
from dglkge.embeddings.row_lookup import ExchangeLookup, FoundRows, RequestedLookup
from tests.embeddings.memory_tables import Machines, assert_rows, draw, expect, run_trainers
from tests.optim.test_exchanges import ThreadGroup, Threads

LAYOUTS = [[0, 1], [0, 0, 1], [2, 1, 0, 0, 2, 1], [0, 0]]
"""The machine of each rank."""

NUM_STEPS = 10


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("layout, wire_dtype", list(zip(LAYOUTS, [torch.float32, torch.bfloat16] * 2)))
@pytest.mark.parametrize("narrow", [torch.float32, torch.float16])
def test_every_trainer_gets_the_rows_that_it_asks_for(layout, wire_dtype, narrow, ahead):
    """As float32; tables of 16 bits beside one of float32 in one message."""
    wire_dtype = wire_dtype if narrow == torch.float32 else torch.float32
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


@pytest.mark.parametrize(
    ("wire_dtype", "narrow"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_bytes_to_other_machines_are_counted(wire_dtype: torch.dtype, narrow: torch.dtype) -> None:
    """Distinct ids of four bytes, their rows, and the numbers of rows; nothing for the own machine's.

    Rows of 16 bits travel as they are, padded to whole numbers of those of 32.
    """
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
    copied = FoundRows.in_array(LOCAL).part(slice(2, 5)).copied(room)
    assert copied is room
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
        self.machines = machines
        self.answers: list[Any] = []
        self.num_asked = 0
        self._random = np.random.default_rng(3)

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


def lookup_of(machines: Machines, machine: int) -> RequestedLookup:
    tables = machines.tables(machine)
    for name, table in tables.items():
        table.embedding = SimpleNamespace(_tensor=SimpleNamespace(_name=name))
        table.typed = lambda rows: rows
    return RequestedLookup(tables, AHEAD)


@pytest.mark.parametrize("machine", [0, 1, 2])
def test_remote_rows_are_those_of_the_request_and_own_rows_of_now(servers: Servers, machine: int) -> None:
    """The oracle keeps all tables as they were at each step; a batch is asked for three steps before."""
    machines, seen, asked_at = servers.machines, [], {}
    lookup, away = lookup_of(machines, machine), 0
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
