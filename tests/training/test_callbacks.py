"""Callbacks of users: what is called when, in one life and after a stop, and what they save."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from dglkge.distributed.preemption import Preempted
from dglkge.errors import InputError
from dglkge.training.callbacks import CALLBACKS, Callback
from tests.training.toy_trainer import ToyRun

EVENTS = ("on_fit_start", "on_epoch_start", "on_batch_end", "on_commit", "on_epoch_end", "on_fit_end")


class Recorder(Callback):
    """Writes down every call; its state is the number of them."""

    help = "written down"
    calls: list[tuple[Any, ...]] = []

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


for event in EVENTS:

    def follow(self: Recorder, trainer: Any, *arguments: Any, event: str = event) -> None:
        self.count += 1
        numbers = [getattr(argument, "index", argument) for argument in arguments]
        self.calls.append((event.removeprefix("on_"), *numbers))

    setattr(Recorder, event, follow)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setitem(CALLBACKS._members, "recorder", Recorder)
    monkeypatch.setattr(Recorder, "calls", [])
    return Recorder


def of_epoch(epoch: int, version: int) -> list[tuple[Any, ...]]:
    """Return the calls of a whole epoch: a batch's loss is its number for each triple."""
    sizes = [5, 5, 5, 5, 3]
    batches = [("batch_end", index, float(index * size)) for index, size in enumerate(sizes)]
    return [("epoch_start", epoch), *batches, ("commit", version), ("epoch_end", epoch)]


def test_calls_come_in_order(tmp_path: Path, recorder: type[Recorder]) -> None:
    run = ToyRun(tmp_path, "training.callbacks=[recorder]", "training.num_epochs=2")
    run.train(2)
    run.cluster.leave()
    assert recorder.calls == [("fit_start",), *of_epoch(0, 1), *of_epoch(1, 2), ("fit_end",)]


def test_after_a_stop_the_epoch_and_the_state_go_on(tmp_path: Path, recorder: type[Recorder]) -> None:
    settings = ("training.callbacks=[recorder]", "training.num_epochs=1")
    first = ToyRun(tmp_path, *settings)
    with first.cluster.stop.listening(), pytest.raises(Preempted):
        for _ in first.epochs.remaining_until(1):
            for batch in first.trainer.batches():
                first.trainer.step(batch)
                if batch.index == 2:
                    signal.raise_signal(signal.SIGTERM)
    stopped = [("fit_start",), *of_epoch(0, 1)[:4], ("commit", 1)]
    assert recorder.calls == stopped
    recorder.calls.clear()
    second = ToyRun(tmp_path, *settings)
    second.train(1)
    assert recorder.calls == [("fit_start",), ("epoch_start", 0), *of_epoch(0, 2)[4:]]
    # The state is that of the commit, before which 5 calls were counted; 6 follow.
    assert second.trainer._callbacks[0].count == len(stopped) - 1 + len(recorder.calls)


def test_a_callback_may_stop_the_training_and_rank(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            trainer.evaluate("test")
            if epoch == 1:
                signal.raise_signal(signal.SIGTERM)
                trainer.stop_if_asked()

    run = ToyRun(tmp_path, "training.num_epochs=5")
    run.trainer.add_callback(Stop())
    with run.cluster.stop.listening(), pytest.raises(Preempted):
        run.train(5)
    assert run.evaluator.ranked == ["test", "test"] and run.committed() == (2, 0)


WATCHED = (
    "training.num_epochs=9",
    "training.early_stopping.patience=2",
    "evaluation.valid_every_epochs=1",
    "evaluation.metric=gain",
)


def measuring(folder: Path, measures: list[dict[str, float]]) -> ToyRun:
    """Return a run whose MRR always rises, with a callback that returns these measures in turn."""
    each = iter(measures)

    class Measure(Callback):
        def on_ranking(self, trainer: Any, split: str, result: Any) -> dict[str, float]:
            return next(each)

    run = ToyRun(folder, *WATCHED, own_config=True)
    run.evaluator.mrr = iter([0.1, 0.2, 0.3, 0.4])
    run.trainer.add_callback(Measure())
    return run


def test_a_measure_of_a_callback_decides_on_the_best_version(tmp_path: Path) -> None:
    run = measuring(tmp_path, [{"gain": gain} for gain in (1.0, 3.0, 2.0, 2.5)])
    run.train(9)
    run.cluster.leave()
    assert run.committed() == (2, 0) and run.evaluator.ranked == ["valid"] * 4
    assert json.loads((tmp_path / "metrics.json").read_text())["valid"]["both"] == {"mrr": 0.2, "gain": 3.0}
    lines = map(json.loads, (tmp_path / "stats.jsonl").read_text().splitlines())
    assert [line["valid"]["gain"] for line in lines if "valid" in line] == [1.0, 3.0, 2.0, 2.5]


def test_a_measure_that_no_callback_returns(tmp_path: Path) -> None:
    run = measuring(tmp_path, [{"gains": 1.0}])
    with pytest.raises(InputError, match="evaluation.metric: 'gain'; did you mean 'gains'"):
        run.train(9)
