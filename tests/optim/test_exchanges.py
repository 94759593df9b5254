"""The exchange of a step among threads that play trainers on several machines, against a plain sum."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.optim import step_exchange
from dglkge.optim.network_exchange import WireFormat
from dglkge.optim.outboxes import NeighbourOutbox, Outbox
from dglkge.optim.row_chains import GradientRows
from dglkge.optim.step_exchange import StepExchange
from dglkge.optim.workspace import Scratch

DIMS = (3, 5)
NUM_STEPS = 6


def in_threads(size: int, run: Callable[[int], Any]) -> list[Any]:
    """Run a function of the rank in as many threads; returns what each returned."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        return [future.result(timeout=100) for future in futures]


class Threads:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.board: list[Any] = [None] * size


class ThreadGroup:
    """A process group of threads with the interface of ``Alltoall``."""

    def __init__(self, threads: Threads, rank: int, timeout_seconds: float = 60.0) -> None:
        self.threads, self.rank, self.size = threads, rank, len(threads.board)
        self.timeout_seconds = timeout_seconds

    def gather(self, value: Any) -> list:
        self.threads.barrier.wait()
        self.threads.board[self.rank] = value
        self.threads.barrier.wait()
        return list(self.threads.board)

    def counts(self, counts: np.ndarray) -> np.ndarray:
        return np.stack([sent[self.rank] for sent in self.gather(counts.copy())])

    def messages(
        self, sent: np.ndarray, sent_bytes: list[int], received: np.ndarray, received_bytes: Any
    ) -> None:
        cuts = np.cumsum([0, *sent_bytes])
        pieces = [sent[start:end].copy() for start, end in zip(cuts, cuts[1:])]
        arrived = [from_one[self.rank] for from_one in self.gather(pieces)]
        assert [len(piece) for piece in arrived] == list(received_bytes)
        received[:] = np.concatenate(arrived)

    def sum(self, values: np.ndarray) -> np.ndarray:
        return np.sum(self.gather(values.copy()), axis=0)


def starts_of(num_machines: int) -> list[np.ndarray]:
    """Ranges of two tables, one machine without any row of the second."""
    first = np.linspace(0, 90, num_machines + 1).astype(np.int64)
    second = np.array([0] * num_machines + [40])
    return [first, second]


def own_gradients(rank: int, step: int, table: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids with duplicates and common hubs; rows that any wire carries exactly; sometimes none."""
    rng = np.random.default_rng(100 * rank + 10 * step + table)
    num_ids = 0 if (rank + step) % 4 == 3 else int(rng.integers(1, 60))
    ids = rng.integers(0, (90, 40)[table], num_ids)
    ids[: num_ids // 4] = 7
    return ids, (rng.integers(-8, 9, (num_ids, DIMS[table])) / 4).astype(np.float32)


def trainer(threads: Threads, layout: list[int], rank: int, wire: WireFormat) -> tuple[list[dict], int]:
    """All steps of one trainer; returns what it updated in each, and the bytes that it sent."""
    chains = [GradientRows(dim, np.dtype(np.float32)) for dim in DIMS]
    group: Any = ThreadGroup(threads, rank)
    exchange = StepExchange(group, layout[rank], starts_of(max(layout) + 1), chains, wire)
    steps = []
    for step in range(NUM_STEPS):
        for table, chain in enumerate(chains):
            chain.clear()
            chain.add(*own_gradients(rank, step, table))
        updated: dict[Any, Any] = {}
        for selected, active in exchange.run():
            for table, (chain, keys) in enumerate(zip(chains, selected)):
                rows, counts = torch.empty(len(keys), chain.dim), np.empty(len(keys), np.int64)
                chain.merge_into(keys, rows, counts, Scratch())
                for key, row, count in zip(chain.keys[keys].tolist(), rows.tolist(), counts.tolist()):
                    assert (table, key) not in updated
                    updated[table, key] = row, count
            updated["active"] = active.tolist()
        num_bad, updated["extra"] = exchange.finish(np.array([rank, 1]), extra=rank == step)
        updated["sum"] = num_bad.tolist()
        steps.append(updated)
    return steps, exchange.sent_bytes


@pytest.mark.parametrize(
    ("layout", "wire_dtype", "shares_memory"),
    [
        ([0], torch.float32, True),
        ([0, 0], torch.float32, True),
        ([0, 0], torch.bfloat16, False),
        ([0, 1], torch.float16, True),
        ([1, 0, 1], torch.bfloat16, True),
        ([1, 0, 1], torch.float32, "another namespace"),
        ([0, 0, 0, 0], torch.float16, True),
        ([0, 1, 0, 2, 1], torch.float32, True),
        ([0, 1, 0, 2, 1], torch.float16, False),
    ],
    ids=str,
)
def test_every_row_reaches_one_trainer_of_its_machine(
    layout, wire_dtype, shares_memory, monkeypatch, tmp_path
) -> None:
    """The sums and counts are those of all trainers' gradients together."""
    if not shares_memory:
        monkeypatch.setattr(step_exchange, "usable", lambda: False)
    if shares_memory == "another namespace":
        # Where the ids of processes are others, an address names some other process's file.
        (tmp_path / "short").write_text("of another process")
        file = (tmp_path / "short").open("rb")

        class Elsewhere(Outbox):
            def __init__(self, num_fields: int) -> None:
                super().__init__(num_fields)
                self.address = self.address._replace(descriptor=file.fileno())

        monkeypatch.setattr(step_exchange, "Outbox", Elsewhere)
    size, threads = len(layout), Threads(len(layout))
    wire = WireFormat((wire_dtype,) * 2, DIMS, np.dtype(np.int32), True)
    results = in_threads(size, lambda rank: trainer(threads, layout, rank, wire))
    starts = starts_of(max(layout) + 1)
    for step in range(NUM_STEPS):
        sums: dict[Any, Any] = defaultdict(float)
        counts: dict[Any, int] = defaultdict(int)
        for rank in range(size):
            for table in range(2):
                for key, row in zip(*own_gradients(rank, step, table)):
                    sums[table, int(key)] = sums[table, int(key)] + row
                    counts[table, int(key)] += 1
        updated: dict[Any, Any] = {}
        for rank, (steps, _) in enumerate(results):
            mine = dict(steps[step])
            assert mine.pop("sum") == [size * (size - 1) // 2, size]
            assert mine.pop("extra") == int(step < size)
            assert mine.pop("active") == [any(key[0] == table for key in sums) for table in range(2)]
            for (table, key), value in mine.items():
                part = int(np.searchsorted(starts[table], key, side="right")) - 1
                assert layout[rank] == part
                assert (table, key) not in updated
                updated[table, key] = value
        assert {key: count for key, (_, count) in updated.items()} == dict(counts)
        for key, row in sums.items():
            assert updated[key][0] == row.tolist()
    sent = [sent_bytes for _, sent_bytes in results]
    assert (max(sent) > 0) == (size > 1)


def test_an_address_that_is_no_outbox_is_refused_and_not_waited_for(tmp_path) -> None:
    """A pipe without a writer blocks whoever opens it; a file may be too short, or the memory another's."""
    reader, writer = os.pipe()
    os.close(writer)
    box = Outbox(5)
    (tmp_path / "short").write_text("short")
    with (tmp_path / "short").open("rb") as short, open("/dev/zero", "rb") as endless:
        for descriptor in (reader, short.fileno(), endless.fileno()):
            with pytest.raises(OSError, match="is no outbox"):
                NeighbourOutbox(1, box.address._replace(descriptor=descriptor))
    os.close(reader)
    with pytest.raises(OSError, match="is no outbox"):
        NeighbourOutbox(1, box.address._replace(header_bytes=10 * box.address.header_bytes))
    with pytest.raises(OSError, match="is not trainer 1"):
        NeighbourOutbox(1, box.address._replace(token=7))
    assert NeighbourOutbox(1, box.address).fields.tolist() == box.fields.tolist()


def test_rows_of_one_trainer_alone_do_not_travel() -> None:
    """Two trainers of a machine with nothing in common send ids only."""
    threads = Threads(2)
    wire = WireFormat((torch.float32,), (64,), np.dtype(np.int32), False)

    def run(rank: int) -> tuple[int, list[int]]:
        chains = [GradientRows(64, np.dtype(np.float32))]
        group: Any = ThreadGroup(threads, rank)
        exchange = StepExchange(group, 0, [np.array([0, 1000])], chains, wire)
        chains[0].add(np.arange(100) + 500 * rank, np.ones((100, 64), np.float32))
        updated = [len(selected[0]) for selected, _ in exchange.run()]
        exchange.finish(np.zeros(1, np.int64))
        return exchange.sent_bytes, updated

    results = in_threads(2, run)
    assert results == [(400, [100, 0])] * 2


def test_asynchronous_trainers_do_not_wait() -> None:
    """Each updates the rows that it has gradients for, one after the other, and nothing travels. They meet
    once, at the start, to share out what each of them saves."""
    threads = Threads(2)
    wire = WireFormat((torch.float32,), (3,), np.dtype(np.int32), False)
    chains_of = [[GradientRows(3, np.dtype(np.float32))] for _ in range(2)]
    groups: list[Any] = [ThreadGroup(threads, rank) for rank in range(2)]

    def start(rank: int) -> StepExchange:
        return StepExchange(groups[rank], 0, [np.array([0, 9])], chains_of[rank], wire, synchronous=False)

    exchanges = in_threads(2, start)
    for rank, (exchange, chains) in enumerate(zip(exchanges, chains_of)):
        assert (exchange.place, exchange.num_places) == (rank, 2)
        chains[0].add(np.array([4, 5, 4]), np.ones((3, 3), np.float32))
        turns = [(selected[0].tolist(), active.tolist()) for selected, active in exchange.run()]
        assert turns == [([0, 1], [True])]
        assert exchange.finish(np.array([rank]), extra=True) == (np.array([rank]), 1)
        assert exchange.sent_bytes == 0


@pytest.mark.parametrize("max_lag", [1, 4])
def test_machines_that_do_not_wait(max_lag: int) -> None:
    """Every gradient is applied exactly once, on a trainer of the row's machine, by the end of a drain; no
    trainer is ever more than ``max_lag`` steps ahead; flags arrive at the same step of all trainers."""
    num_steps, size, num_rows, threads = 40, 3, 12, Threads(3)
    machines, starts = [0, 1, 0], np.array([0, 5, num_rows])
    wire = WireFormat((torch.float32,), (2,), np.dtype(np.int32), False)
    started, flagged = [0] * size, [{} for _ in range(size)]
    totals, expected = np.zeros((2, size, num_rows, 2)), np.zeros((num_rows, 2))
    keys = np.random.default_rng(0).integers(0, num_rows, (2, size, num_steps, 6))
    np.add.at(expected, keys.ravel(), [1.0, 2.0])

    def run(rank: int) -> None:
        group: Any = ThreadGroup(threads, rank)
        chains = [GradientRows(2, np.dtype(np.float32))]

        def add(part: int, rows: GradientRows, selected: np.ndarray) -> None:
            merged = torch.zeros(len(selected), 2)
            rows.merge_into(selected, merged, np.empty(len(selected), np.int64), Scratch())
            totals[part, rank][rows.keys[selected]] += merged.numpy()

        def apply() -> None:
            assert exchange.lagged is not None
            rows = exchange.lagged.arrived[0]
            add(0, rows, np.arange(rows.num_keys))

        exchange = StepExchange(
            group, machines[rank], [starts], chains, wire, synchronous=False, max_lag=max_lag, apply=apply
        )
        assert exchange.lagged is not None
        for period in range(2):
            threads.barrier.wait()
            started[rank] = 0
            threads.barrier.wait()
            for step in range(num_steps):
                started[rank] += 1
                chains[0].add(keys[period, rank, step], np.tile(np.float32([1, 2]), (6, 1)))
                flags = int(rank == 1 and step == 5)
                for selected, _ in exchange.run(extra=flags):
                    assert started[rank] - min(started) <= max_lag
                    add(1, chains[0], selected[0])
                chains[0].clear()
                if rank == 1:
                    np.linalg.svd(np.ones((60, 60)))  # the slow one
                _, got = exchange.finish(np.zeros(1, np.int64))
                if got:
                    flagged[rank][period, step] = got
            exchange.lagged.drain()
            threads.barrier.wait()
            if rank == 0:
                assert totals.sum() == keys[: period + 1].size * 3

    in_threads(size, run)
    np.testing.assert_array_equal(totals.sum((0, 1)), expected)
    for rank, machine in enumerate(machines):
        elsewhere = np.ones(num_rows, bool)
        elsewhere[starts[machine] : starts[machine + 1]] = False
        assert not totals[:, rank, elsewhere].any()
    assert flagged[0] == flagged[1] == flagged[2]
    assert [period for period, _ in flagged[0]] == [0, 1] and set(flagged[0].values()) == {1}


def test_an_error_between_machines_ends_the_next_step() -> None:
    """What fails in the thread is raised where training waits, also in a drain."""
    threads = Threads(2)
    wire = WireFormat((torch.float32,), (2,), np.dtype(np.int32), False)

    class Broken(ThreadGroup):
        def messages(self, *arguments: Any) -> None:
            raise ConnectionError("trainer 1 is gone")

    def run(rank: int) -> None:
        group: Any = Broken(threads, rank)
        chains = [GradientRows(2, np.dtype(np.float32))]
        exchange = StepExchange(
            group, rank, [np.array([0, 4, 9])], chains, wire, synchronous=False, max_lag=2
        )
        assert exchange.lagged is not None
        list(exchange.run())
        with pytest.raises(ConnectionError, match="trainer 1 is gone"):
            exchange.lagged.drain()
        with pytest.raises(ConnectionError, match="trainer 1 is gone"):
            list(exchange.run())

    in_threads(2, run)


def test_many_tables() -> None:
    """The header grows with the number of tables: a hundred node types are exchanged at once."""
    threads, num_tables = Threads(2), 100
    wire = WireFormat((torch.float32,) * num_tables, (1,) * num_tables, np.dtype(np.int32), False)

    def run(rank: int) -> tuple[int, list[int]]:
        chains = [GradientRows(1, np.dtype(np.float32)) for _ in range(num_tables)]
        group: Any = ThreadGroup(threads, rank)
        exchange = StepExchange(group, 0, [np.array([0, 9])] * num_tables, chains, wire)
        for table, chain in enumerate(chains):
            chain.add(np.array([table % 9]), np.ones((1, 1), np.float32))
        num_updated = sum(len(keys) for selected, _ in exchange.run() for keys in selected)
        return num_updated, exchange.finish(np.arange(num_tables))[0].tolist()

    results = in_threads(2, run)
    assert sum(num_updated for num_updated, _ in results) == num_tables
    assert all(sums == [2 * table for table in range(num_tables)] for _, sums in results)
