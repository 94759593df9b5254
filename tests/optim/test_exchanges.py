"""The exchange of a step among threads that play trainers (test_cluster.py has processes)."""

from __future__ import annotations

import os
import threading
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


def wire_of(dims: tuple[int, ...]) -> WireFormat:
    return WireFormat((torch.float32,) * len(dims), dims, np.dtype(np.int32), False)


def chains_of(dims: tuple[int, ...]) -> list[GradientRows]:
    return [GradientRows(dim, np.dtype(np.float32)) for dim in dims]


def add_merged(totals: np.ndarray, rows: GradientRows, selected: np.ndarray) -> None:
    merged = torch.zeros(len(selected), rows.dim)
    rows.merge_into(selected, merged, np.empty(len(selected), np.int64), Scratch())
    totals[rows.keys[selected]] += merged.numpy()


def in_threads(size: int, run: Callable[[int], Any]) -> list[Any]:
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

    def messages(self, sent: np.ndarray, sent_bytes: list, received: np.ndarray, received_bytes: Any) -> None:
        cuts = np.cumsum([0, *sent_bytes])
        pieces = [sent[start:end].copy() for start, end in zip(cuts, cuts[1:])]
        arrived = [from_one[self.rank] for from_one in self.gather(pieces)]
        assert [len(piece) for piece in arrived] == list(received_bytes)
        received[:] = np.concatenate(arrived)

    def sum(self, values: np.ndarray) -> np.ndarray:
        return np.sum(self.gather(values.copy()), axis=0)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_rows_of_one_trainer_alone_do_not_travel(is_elsewhere: bool, tmp_path, monkeypatch) -> None:
    """Of two on a machine; if process ids differ, an address names another's file, and all is sent."""
    if is_elsewhere:
        (tmp_path / "short").write_text("of another process")
        file = (tmp_path / "short").open("rb")

        class Elsewhere(Outbox):
            def __init__(self, num_fields: int) -> None:
                super().__init__(num_fields)
                self.address = self.address._replace(descriptor=file.fileno())

        monkeypatch.setattr(step_exchange, "Outbox", Elsewhere)
    threads = Threads(2)

    def run(rank: int) -> tuple[int, int, np.ndarray]:
        chains, group = chains_of((64,)), ThreadGroup(threads, rank)
        exchange = StepExchange(group, 0, [np.array([0, 1000])], chains, wire_of((64,)))
        totals = np.zeros((1000, 64))
        for common in (0, 7):
            chains[0].clear()
            ids = np.r_[np.arange(100) + 500 * rank, np.full(common, 300)]
            chains[0].add(ids, np.ones((len(ids), 64), np.float32))
            before, num_updated = exchange.sent_bytes, 0
            for (selected,), _ in exchange.run():
                add_merged(totals, chains[0], selected)
                num_updated += len(selected)
            exchange.finish(np.zeros(1, np.int64))
            if not common:
                alone = exchange.sent_bytes - before, num_updated
        return *alone, totals

    results = in_threads(2, run)
    if not is_elsewhere:
        assert [(sent, num_updated) for sent, num_updated, _ in results] == [(400, 100)] * 2
    expected = np.zeros((1000, 64))
    expected[[*range(100), *range(500, 600)]] = 2
    expected[300] = 14
    np.testing.assert_array_equal(sum(totals for *_, totals in results), expected)


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


def test_asynchronous_trainers_do_not_wait() -> None:
    """Each updates the rows of its own gradients; they meet once, to share out what each of them saves."""
    threads, chains_by_rank = Threads(2), [chains_of((3,)) for _ in range(2)]

    def start(rank: int) -> StepExchange:
        group, starts = ThreadGroup(threads, rank), [np.array([0, 9])]
        return StepExchange(group, 0, starts, chains_by_rank[rank], wire_of((3,)), synchronous=False)

    for rank, (exchange, chains) in enumerate(zip(in_threads(2, start), chains_by_rank)):
        assert (exchange.place, exchange.num_places) == (rank, 2)
        chains[0].add(np.array([4, 5, 4]), np.ones((3, 3), np.float32))
        turns = [(selected[0].tolist(), active.tolist()) for selected, active in exchange.run()]
        assert turns == [([0, 1], [True])]
        assert exchange.finish(np.array([rank]), extra=True) == (np.array([rank]), 1)
        assert exchange.sent_bytes == 0


@pytest.mark.parametrize("max_lag", [1, 4])
def test_machines_that_do_not_wait(max_lag: int) -> None:
    """Each gradient is applied once, on the row's machine, by the end of a drain; flags arrive together."""
    num_steps, size, num_rows, threads = 40, 3, 12, Threads(3)
    machines, starts = [0, 1, 0], np.array([0, 5, num_rows])
    started, flagged = [0] * size, [{} for _ in range(size)]
    totals, expected = np.zeros((2, size, num_rows, 2)), np.zeros((num_rows, 2))
    keys = np.random.default_rng(0).integers(0, num_rows, (2, size, num_steps, 6))
    np.add.at(expected, keys.ravel(), [1.0, 2.0])

    def run(rank: int) -> None:
        chains, group = chains_of((2,)), ThreadGroup(threads, rank)

        def apply() -> None:
            rows = exchange.lagged.arrived[0]
            add_merged(totals[0, rank], rows, np.arange(rows.num_keys))

        options = {"synchronous": False, "max_lag": max_lag, "apply": apply}
        exchange = StepExchange(group, machines[rank], [starts], chains, wire_of((2,)), **options)
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
                    add_merged(totals[1, rank], chains[0], selected[0])
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

    class Broken(ThreadGroup):
        def messages(self, *arguments: Any) -> None:
            raise ConnectionError("trainer 1 is gone")

    def run(rank: int) -> None:
        arguments = (Broken(threads, rank), rank, [np.array([0, 4, 9])], chains_of((2,)), wire_of((2,)))
        exchange = StepExchange(*arguments, synchronous=False, max_lag=2)
        list(exchange.run())
        for wait in (exchange.lagged.drain, lambda: list(exchange.run())):
            with pytest.raises(ConnectionError, match="trainer 1 is gone"):
                wait()

    in_threads(2, run)


def test_many_tables() -> None:
    """The header grows with the number of tables: a hundred node types are exchanged at once."""
    threads, dims = Threads(2), (1,) * 100

    def run(rank: int) -> tuple[int, list[int]]:
        chains, group = chains_of(dims), ThreadGroup(threads, rank)
        exchange = StepExchange(group, 0, [np.array([0, 9])] * 100, chains, wire_of(dims))
        for table, chain in enumerate(chains):
            chain.add(np.array([table % 9]), np.ones((1, 1), np.float32))
        num_updated = sum(len(keys) for selected, _ in exchange.run() for keys in selected)
        return num_updated, exchange.finish(np.arange(100))[0].tolist()

    num_updated, sums = zip(*in_threads(2, run))
    assert sum(num_updated) == 100 and sums == ([*range(0, 200, 2)],) * 2
