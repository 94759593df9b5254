"""When versions are written and kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.training.building.checks import check_config
from dglkge.training.cadence import Cadence


class Clock:
    """A clock that stands until it is set."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def policy(*settings, rank=0, clock=None, num_batches=9):
    config = load_config(None, ["dataset=x", "training.num_epochs=10", *settings])
    check_config(config)
    cluster = SimpleNamespace(world=SimpleNamespace(rank=rank))  # no sum: it exchanges nothing
    return Cadence(config, cluster, num_batches, clock or Clock())


def test_batches():
    chosen = policy("checkpoint.every_batches=3")
    asked = []
    for n in range(1, 10):
        if chosen.asks_after_batch(n):
            asked.append(n)
            chosen.committed()
    assert asked == [3, 6]  # the 9th ends the epoch
    assert [n for n in range(1, 10) if chosen.counts(n)] == [3, 6, 9]
    assert not any(policy().asks_after_batch(n) or policy().counts(n) for n in range(1, 10))


def test_minutes_are_those_of_rank_0():
    clock = Clock()
    first, second = (policy("checkpoint.every_minutes=2", rank=rank, clock=clock) for rank in (0, 1))
    asked = []
    for clock.seconds in (0, 119, 120, 130, 239, 241):
        asked.append(first.asks_after_batch(1))
        assert not second.asks_after_batch(1)
        if asked[-1]:
            first.committed()
    assert asked == [False, False, True, False, False, True]


def test_what_is_due_while_a_version_is_written_waits_for_the_next_batch():
    chosen = policy("checkpoint.every_batches=3", num_batches=12)
    asked = []
    for batches in range(1, 12):
        if chosen.asks_after_batch(batches, is_writing=3 <= batches <= 4):
            asked.append(batches)
            chosen.committed()
    assert asked == [5, 6, 9]


def test_minutes_that_are_over_while_a_version_is_written():
    clock = Clock()
    chosen = policy("checkpoint.every_minutes=2", clock=clock)
    clock.seconds = 121
    assert [chosen.asks_after_batch(1, writing) for writing in (True, True, False)] == [False, False, True]


def test_epochs():
    chosen = policy("checkpoint.every_epochs=4", "checkpoint.keep_every_epochs=3")
    assert [n for n in range(1, 11) if chosen.due_after_epoch(n)] == [3, 4, 6, 8, 9, 10]
    kept = [chosen.pointers_after_epoch(n) for n in range(1, 11)]
    assert [list(one) for one in kept if one] == [["epoch_3"], ["epoch_6"], ["epoch_9"]]
    assert [n for n in range(1, 11) if policy("checkpoint.every_epochs=0").due_after_epoch(n)] == [10]


def test_the_best_needs_a_measure():
    with pytest.raises(InputError, match="keep_best is true and evaluation.valid_every_epochs is 0"):
        policy("checkpoint.keep_best=true")
    chosen = policy(
        "checkpoint.keep_best=true", "evaluation.valid_every_epochs=5", "checkpoint.every_epochs=0"
    )
    assert [n for n in range(1, 11) if chosen.due_after_epoch(n)] == [5, 10]
