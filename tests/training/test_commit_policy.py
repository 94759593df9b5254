"""When versions are written and kept."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.training.epochs import CommitPolicy


class Clock:
    """A clock that stands until it is set."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Trainers:
    """Some trainers' sums, one after the other: rank 0 first, whose value the others get as well."""

    def __init__(self) -> None:
        self.sent: np.ndarray | None = None

    def cluster(self, rank: int) -> SimpleNamespace:
        def total(values: np.ndarray) -> np.ndarray:
            if rank == 0:
                self.sent = values
                return values
            return values + self.sent

        return SimpleNamespace(world=SimpleNamespace(rank=rank), sum=total)


def policy(*settings, cluster=None, clock=None):
    config = load_config(None, ["dataset=x", "training.num_epochs=10", *settings])
    return CommitPolicy(config, cluster or Trainers().cluster(0), clock or Clock())


def test_batches():
    chosen = policy("checkpoint.every_batches=3")
    assert [n for n in range(1, 10) if chosen.due_after_batch(n, 9)] == [3, 6]  # the 9th ends the epoch
    assert not any(policy().due_after_batch(n, 9) for n in range(1, 10))


def test_minutes_are_those_of_rank_0():
    trainers, clocks = Trainers(), [Clock(), Clock()]
    both = [
        policy("checkpoint.every_minutes=2", cluster=trainers.cluster(rank), clock=clocks[rank])
        for rank in (0, 1)
    ]
    due = []
    for seconds in (0, 119, 120, 130, 239, 241):
        clocks[0].seconds, clocks[1].seconds = seconds, 10_000 - seconds
        answers = {one.due_after_batch(1, 9) for one in both}
        assert len(answers) == 1
        due.append(answers.pop())
        if due[-1]:
            for one in both:
                one.committed()
    assert due == [False, False, True, False, False, True]


def test_what_is_due_while_a_version_is_written_waits_for_the_next_batch():
    trainers = Trainers()
    both = [policy("checkpoint.every_batches=3", cluster=trainers.cluster(rank)) for rank in (0, 1)]
    due = []
    for batches in range(1, 12):
        writing = (3 <= batches <= 4, batches != 7)  # of rank 1 it does not matter
        answers = {one.due_after_batch(batches, 12, writing[rank]) for rank, one in enumerate(both)}
        assert len(answers) == 1
        if answers.pop():
            due.append(batches)
            for one in both:
                one.committed()
    assert due == [5, 6, 9]


def test_minutes_that_are_over_while_a_version_is_written():
    clock = Clock()
    chosen = policy("checkpoint.every_minutes=2", clock=clock)
    clock.seconds = 121
    assert [chosen.due_after_batch(1, 9, writing) for writing in (True, True, False)] == [False, False, True]


def test_epochs():
    chosen = policy("checkpoint.every_epochs=4", "checkpoint.keep_every_epochs=3")
    assert [n for n in range(1, 11) if chosen.due_after_epoch(n)] == [3, 4, 6, 8, 9, 10]
    kept = [chosen.snapshots_after_epoch(n) for n in range(1, 11)]
    assert [list(one) for one in kept if one] == [["epoch_3"], ["epoch_6"], ["epoch_9"]]
    assert [n for n in range(1, 11) if policy("checkpoint.every_epochs=0").due_after_epoch(n)] == [10]


def test_the_best_needs_a_measure():
    with pytest.raises(
        InputError, match="keep_best needs evaluation.valid_every_epochs of at least 1, got 0"
    ):
        policy("checkpoint.keep_best=true")
    chosen = policy(
        "checkpoint.keep_best=true", "evaluation.valid_every_epochs=5", "checkpoint.every_epochs=0"
    )
    assert [n for n in range(1, 11) if chosen.due_after_epoch(n)] == [5, 10]
