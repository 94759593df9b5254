"""Lookup of rows: in place, copied, and from other machines."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.embeddings.row_exchange import RowExchange
from dglkge.embeddings.row_lookup import ExchangeLookup, FoundRows
from tests.embeddings.memory_tables import Machines, assert_rows, draw, expect, run_trainers, train
from tests.optim.test_exchanges import ThreadGroup, Threads

LAYOUTS = [[0, 1], [0, 0, 1], [2, 1, 0, 0, 2, 1], [0, 0]]
"""The machine of each rank."""

NUM_STEPS = 10


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("layout, wire_dtype", list(zip(LAYOUTS, [torch.float32, torch.bfloat16] * 2)))
def test_every_trainer_gets_the_rows_that_it_asks_for(layout, wire_dtype, ahead):
    machines = Machines(max(layout) + 1)

    def trainer(rank: int, machine: int, lookup: ExchangeLookup, _: Threads) -> None:
        for step in range(NUM_STEPS):
            table_ids = draw(machines, step, rank)
            got = lookup.rows(step, table_ids)
            assert_rows(got, expect(machines, machines.rows, table_ids, machine, wire_dtype))
            if ahead and step % 4 != 3:  # what is announced in vain is dropped
                lookup.announce(step + 1, draw(machines, step + 1 if step % 4 else 99, rank))
                if step % 4 == 0:
                    lookup.announce(step + 1, draw(machines, step + 1, rank))

    run_trainers(machines, layout, trainer, wire_dtype)


@pytest.mark.parametrize("layout, staleness", [(LAYOUTS[1], 0), (LAYOUTS[0], 1), (LAYOUTS[2], 1)])
def test_rows_are_as_old_as_the_setting_says(layout: list[int], staleness: int) -> None:
    machines = Machines(max(layout) + 1)
    before = {name: rows.clone() for name, rows in machines.rows.items()}

    def trainer(rank: int, machine: int, lookup: ExchangeLookup, threads: Threads) -> None:
        meet = threads.barrier.wait
        train(machines, rank, machine, lookup, staleness, before, rank == 0, meet, NUM_STEPS)

    run_trainers(machines, layout, trainer, staleness=staleness)


def test_rows_that_are_still_read_are_not_overwritten_by_those_of_the_next_batch() -> None:
    machines = Machines(2)

    def trainer(rank: int, machine: int, lookup: ExchangeLookup, _: Threads) -> None:
        for step in range(0, NUM_STEPS, 2):
            table_ids = draw(machines, step, rank)
            located = lookup.rows(step, table_ids)
            assert any(len(rows.arrays[1]) for rows in located.values())
            lookup.announce(step + 1, draw(machines, step + 1, rank))
            lookup.finish()  # all that travels ahead has come
            assert_rows(located, expect(machines, machines.rows, table_ids, machine))

    run_trainers(machines, [0, 1], trainer, staleness=1)


@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16])
def test_bytes_to_other_machines_are_counted(wire_dtype: torch.dtype) -> None:
    """Distinct ids of four bytes, their rows, and the numbers of rows; nothing for the own machine's."""
    machines, layout = Machines(2), [0, 0, 1]
    num_tables = len(machines.rows)
    rank_ids = [draw(machines, 1, rank) for rank in range(3)]

    def trainer(rank: int, machine: int, lookup: ExchangeLookup, _: Threads) -> int:
        lookup.rows(0, rank_ids[rank])
        return lookup.sent_bytes

    sent = sum(run_trainers(machines, layout, trainer, wire_dtype))
    expected = 4 * (num_tables + 1) * 8  # two trainers with one stranger each, one with two
    for rank, machine in enumerate(layout):
        for name, ids in rank_ids[rank].items():
            away = ids[~machines.is_local(name, ids, machine)].unique()
            expected += len(away) * (4 + machines.rows[name].shape[1] * wire_dtype.itemsize)
    assert sent == expected


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

    def trainer(rank: int, machine: int, lookup: ExchangeLookup, _: Threads) -> str:
        with pytest.raises(RuntimeError) as caught:
            lookup.rows(3 + rank, draw(machines, 0, rank))
        return str(caught.value)

    messages = run_trainers(machines, [0, 1], trainer)
    assert messages == [
        f"lookup of rows: trainers [{1 - r}] are at another batch than this one" for r in (0, 1)
    ]


def test_a_failure_in_the_background_is_raised_at_the_next_lookup() -> None:
    machines = Machines(2)

    def trainer(rank: int, machine: int, lookup: ExchangeLookup, _: Threads) -> None:
        lookup.announce(rank, {})
        lookup.before_update()  # does not wait for ever
        with pytest.raises(RuntimeError, match="another batch"):
            lookup.rows(rank, {})

    run_trainers(machines, [0, 1], trainer, staleness=1)


@pytest.mark.parametrize(
    "layout, dtype, staleness",
    [(LAYOUTS[0], torch.float16, 1), (LAYOUTS[1], torch.bfloat16, 0), (LAYOUTS[2], torch.bfloat16, 1)],
)
def test_rows_of_16_bits_travel_as_they_are(layout: list[int], dtype: torch.dtype, staleness: int) -> None:
    """Between rows of float32 in one message; all are float32 when they are found."""
    machines = Machines(max(layout) + 1)
    narrow = [name for name in machines.rows if name != "relation"]
    for name in narrow:
        machines.rows[name] = machines.rows[name].to(dtype)
    widths = {name: rows.element_size() for name, rows in machines.rows.items()}
    assert len(set(widths.values())) == 2

    def trainer(rank: int, machine: int, lookup: ExchangeLookup, _: Threads) -> int:
        for step in range(NUM_STEPS):
            table_ids = draw(machines, step, rank)
            for name, located in lookup.rows(step, table_ids).items():
                expected = machines.rows[name][table_ids[name]].float()
                assert located.copied().dtype == torch.float32
                assert torch.equal(located.copied(), expected), name
            if step + 1 < NUM_STEPS:
                lookup.announce(step + 1, draw(machines, step + 1, rank))
        return lookup.sent_bytes

    sent = run_trainers(machines, layout, trainer, staleness=staleness)
    for name in narrow:
        machines.rows[name] = machines.rows[name].float()
    wide = run_trainers(machines, layout, trainer_of(machines), staleness=staleness)
    assert sum(sent) < sum(wide) if max(layout) else sum(sent) == sum(wide) == 0


def trainer_of(machines: Machines) -> Any:
    """Return a trainer that looks up the rows of all steps, and returns the bytes that it sent."""

    def trainer(rank: int, machine: int, lookup: ExchangeLookup, _: Threads) -> int:
        for step in range(NUM_STEPS):
            lookup.rows(step, draw(machines, step, rank))
        return lookup.sent_bytes

    return trainer


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
