"""Elastic epochs, case by case (the semantics of ``adaptdl.torch.epoch``), and the cadence of commits."""

from __future__ import annotations

import logging

import pytest

from dglkge.errors import InputError
from dglkge.training.elastic import _settings_of
from dglkge.training.script import ElasticEpochs


def test_the_state_is_one_integer() -> None:
    """Rows 1 to 3: calling does nothing until the first next; inside of a loop current equals finished."""
    epochs = ElasticEpochs()
    loop = epochs.remaining_until(3)
    assert epochs.current() is None and epochs.finished() == 0
    for epoch in loop:
        assert epochs.current() == epochs.finished() == epoch
    assert epochs.current() is None and epochs.finished() == 3


def test_a_held_generator_keeps_its_epoch_open_until_it_is_closed() -> None:
    """Row 7: ``next()``, ``close()`` and collection each end the epoch."""
    epochs = ElasticEpochs()
    loop = epochs.remaining_until(5)
    next(loop)
    assert epochs.current() == 0 == epochs.finished()
    next(loop)
    assert epochs.current() == 1 == epochs.finished()
    loop.close()  # type: ignore[attr-defined]
    assert epochs.current() is None and epochs.finished() == 2
    held = epochs.remaining_until(5)
    next(held)
    del held
    assert epochs.current() is None and epochs.finished() == 3


def test_a_second_loop_fails_at_its_first_next_and_does_not_harm_the_first() -> None:
    """Row 8."""
    epochs = ElasticEpochs()
    for epoch in epochs.remaining_until(2):
        second = epochs.remaining_until(9)
        with pytest.raises(RuntimeError, match="overlapping epoch loops detected"):
            next(second)
        assert epochs.current() == epoch == epochs.finished()
    assert epochs.finished() == 2


@pytest.mark.parametrize("until", [2, -3])
def test_a_loop_that_is_done_already_is_empty_and_says_so(until, caplog):
    """Row 9."""
    caplog.set_level(logging.INFO)
    assert list(ElasticEpochs(2).remaining_until(until)) == []
    assert f"epochs until {until} are finished already" in caplog.text


def test_loops_in_a_row_and_after_a_restart_go_on() -> None:
    """Rows 10 and 11; row 6 and row 11 with real checkpoints are in test_trainer.py."""
    epochs = ElasticEpochs()
    assert [*epochs.remaining_until(3), *epochs.remaining_until(6)] == [0, 1, 2, 3, 4, 5]
    restarted = ElasticEpochs(4)
    assert restarted.current() is None
    assert [list(restarted.remaining_until(3)), list(restarted.remaining_until(6))] == [[], [4, 5]]


def test_listeners_hear_only_of_bodies_that_ran_to_their_end() -> None:
    epochs = ElasticEpochs()
    heard: list[int] = []
    epochs.when_finished(lambda: heard.append(epochs.finished()))
    for epoch in epochs.remaining_until(4):
        assert epochs.current() is not None
        if epoch == 2:
            break
    assert heard == [1, 2] and epochs.finished() == 3
    epochs.restore(1)
    assert list(epochs.remaining_until(2)) == [1] and heard == [1, 2]


def test_a_loop_of_an_earlier_training_that_is_closed_late_counts_nothing() -> None:
    """A notebook keeps the last traceback, and with it the open loop, until something else fails."""
    epochs = ElasticEpochs()
    called: list[str] = []
    epochs.when_finished(lambda: called.append("first"))
    left_open = epochs.remaining_until(5)
    next(left_open)
    epochs.forget()
    assert epochs.current() is None and epochs.finished() == 0
    epochs.when_finished(lambda: called.append("second"))
    seen = []
    for epoch in epochs.remaining_until(2):
        left_open.close()
        assert epochs.current() == epoch
        seen.append(epoch)
    assert seen == [0, 1] and epochs.finished() == 2 and called == ["second", "second"]


def test_units_of_the_cadence() -> None:
    settings = _settings_of({"batches": 3, "minutes": 0.5})
    assert (settings.every_epochs, settings.every_batches, settings.every_minutes) == (0, 3, 0.5)
    for intervals, message in (
        ({"batches": 1.5}, "elastic: every batches is 1.5; expected a finite number of at least 0"),
        ({"minutes": -1}, "elastic: every minutes is -1; expected"),
        ({"minutes": float("inf")}, "elastic: every minutes is inf; expected"),
        ({"epochs": True}, "elastic: every epochs is True; expected"),
        ({"steps": 1}, "unknown unit in every 'steps'"),
    ):
        with pytest.raises(InputError, match=message):
            _settings_of(intervals)
