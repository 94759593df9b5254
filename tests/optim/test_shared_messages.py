"""Messages and sums through shared memory, between processes, beside those of torch's process group."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import messages
from dglkge.optim import alltoall
from dglkge.optim.alltoall import Alltoall, SharedAlltoall

SIZE = 3


def in_processes(folder: Path, work: Callable[[int], Any], size: int = SIZE) -> list[Any]:
    """Run a function of the rank in forked processes of one group; return what each returned, by rank."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            store = dist.FileStore(str(folder / "store"), size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            answer = work(rank)
        except BaseException:
            answer = traceback.format_exc()
        pipes[rank][1].send(answer)
        os._exit(0)

    processes = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        for (reader, _), process in zip(pipes, processes):
            connection.wait([reader, process.sentinel], 60)
        return [reader.recv() if reader.poll() else "no answer" for reader, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def pieces_of(sender: int, round_: int) -> list[np.ndarray]:
    """Bytes from a rank to each rank: of all lengths, none too, and longer from round to round."""
    draws = np.random.default_rng([sender, round_])
    lengths = draws.integers(0, 1 + 5000 * round_, SIZE)
    return [draws.integers(0, 256, length, dtype=np.uint8) for length in lengths]


def everything(group: Alltoall, rank: int) -> list[np.ndarray]:
    results = []
    for round_ in range(4):
        own, arriving = pieces_of(rank, round_), [pieces_of(sender, round_)[rank] for sender in range(SIZE)]
        received = np.zeros(sum(map(len, arriving)), np.uint8)
        group.messages(np.concatenate(own), [*map(len, own)], received, [*map(len, arriving)])
        assert received.tolist() == np.concatenate(arriving).tolist()
        results += [received, group.counts(np.arange(SIZE * 2).reshape(SIZE, 2) + 100 * rank + round_)]
        shared = [pieces_of(sender, round_)[0] for sender in range(SIZE)]
        received = np.zeros(sum(map(len, shared)), np.uint8)
        group.share(shared[rank], received, [*map(len, shared)])
        assert received.tolist() == np.concatenate(shared).tolist()
        results += [received, group.sum(np.array([rank + 0.5, round_]))]
    return results


def numbers(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 10 ** (rank * 3)


@pytest.mark.parametrize("is_usable", [True, False])
def test_equal_to_the_process_group(is_usable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one trainer cannot share memory: then none does."""

    def work(rank: int) -> Any:
        if not is_usable and rank == 1:
            monkeypatch.setattr(alltoall, "usable", lambda: False)
        near = SharedAlltoall(30, "exchange", "take part")
        got, expected = everything(near, rank), everything(Alltoall(30), rank)
        equal = [np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected)]
        sums = [near.sum_rows(numbers(rank, count)) for count in (1, 2, 1001, 70_000)]
        return near.near is not None, equal, [total.double().numpy() for total in sums]

    for is_near, equal, sums in in_processes(tmp_path, work):
        assert is_near == is_usable and len(equal) == 16 and all(equal)
        for total in sums:
            exact = sum(numbers(rank, len(total)).double() for rank in range(SIZE)).numpy()
            np.testing.assert_allclose(total, exact, rtol=1.2e-7)
            if is_usable:  # rounded once
                np.testing.assert_array_equal(total, exact.astype(np.float32))


def test_a_trainer_that_ends_or_does_not_come_is_named(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        # After a pass that works, so that outboxes exist and have been read.
        near, late = (SharedAlltoall(30 - 28 * n, "exchange", "take part") for n in range(2))
        near.sum_rows(numbers(rank, 10))
        late.sum_rows(numbers(rank, 10))
        if rank == 2:
            time.sleep(4)
            os.kill(os.getpid(), signal.SIGKILL)
        errors = []
        for group in (late, near):
            try:
                group.sum_rows(numbers(rank, 10))
            except (ConnectionError, TimeoutError) as error:
                errors.append(f"{type(error).__name__}: {error}")
        return errors

    *others, _ = in_processes(tmp_path, work)
    for late, ended in others:
        reason = "trainers [2] did not come within 2 s: every trainer must take part"
        assert late == f"TimeoutError: exchange 3: {reason}"
        assert re.fullmatch(r"ConnectionError: exchange 3: trainer 2 \(process .* ended", ended)


def test_one_trainer_alone() -> None:
    group, received = SharedAlltoall(1, "exchange", "take part"), np.zeros(3, np.uint8)
    group.share(np.array([1, 2, 3], np.uint8), received, [3])
    assert group.near is None and received.tolist() == [1, 2, 3]
    assert group.sum_rows(torch.tensor([0.5])).tolist() == [0.5]


def test_the_benchmark_measures_each_way() -> None:
    with mock.patch.multiple(messages, ROUNDS=1, STEPS=2):
        assert len(messages.measure(2)) == 4
