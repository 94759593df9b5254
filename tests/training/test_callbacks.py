"""Callbacks and trackers: what is called when, what each stores, after a stop and with failures."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dglkge.config import load_config
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.distributed.preemption import Preempted
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.errors import InputError
from dglkge.training import cadence, callbacks
from dglkge.training.callbacks import CALLBACKS, LOGGERS, Callback, TrackedRun, Tracker, Trackers
from dglkge.training.statistics.stats import open_trackers
from tests.training.live import stats_lines
from tests.training.toy_trainer import NUM_BATCHES, ToyRun


@pytest.fixture(autouse=True)
def reports_of_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small graphs have reports after each batch here too."""
    monkeypatch.setattr(cadence, "TRIPLES_A_REPORT", 1)


EVENTS = ("on_fit_start", "on_epoch_start", "on_batch_end", "on_commit", "on_epoch_end", "on_fit_end")


class Recorder(Callback):
    """Writes down every call; its state is the number of them."""

    calls: list[tuple[Any, ...]] = []
    count = 0

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


def epoch_calls(epoch: int, version: int) -> list[tuple[Any, ...]]:
    """Return the calls of a whole epoch: a batch's loss is its number for each triple."""
    sizes = [5, 5, 5, 5, 3]
    batches = [("batch_end", index, float(index * size)) for index, size in enumerate(sizes)]
    return [("epoch_start", epoch), *batches, ("commit", version), ("epoch_end", epoch)]


def test_calls_come_in_order_and_the_epoch_and_the_state_go_on_after_a_stop(tmp_path, recorder):
    settings = ("training.callbacks=[recorder]", "training.num_epochs=1")
    ToyRun(tmp_path, *settings).stop(0, 2)
    stopped = [("fit_start",), *epoch_calls(0, 1)[:4], ("commit", 1)]
    assert recorder.calls == stopped
    recorder.calls.clear()
    second = ToyRun(tmp_path, *settings)
    second.train(1)
    assert recorder.calls == [("fit_start",), ("epoch_start", 0), *epoch_calls(0, 2)[4:]]
    # The state is that of the commit, before which 5 calls were counted; 6 follow.
    assert second.trainer._callbacks[0].count == len(stopped) - 1 + len(recorder.calls)
    second.cluster.leave()
    assert recorder.calls[-1] == ("fit_end",)


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


WATCHED = ("training.early_stopping.patience=2", "evaluation.valid_every_epochs=1", "evaluation.metric=gain")


def measuring(folder: Path, measures: list[dict[str, float]]) -> ToyRun:
    """Return a run whose MRR always rises, with a callback that returns these measures in turn."""
    each = iter(measures)

    class Measure(Callback):
        def on_ranking(self, trainer: Any, split: str, result: Any) -> dict[str, float]:
            return next(each)

    settings = ("training.num_epochs=9", *WATCHED)
    run = ToyRun(folder, *settings, own_config=True, mrr=[0.1, 0.2, 0.3, 0.4])
    run.trainer.add_callback(Measure())
    return run


def test_a_measure_of_a_callback_decides_on_the_best_version(tmp_path: Path) -> None:
    run = measuring(tmp_path, [{"gain": gain} for gain in (1.0, 3.0, 2.0, 2.5)])
    run.finish(9)
    assert run.committed() == (2, 0) and run.evaluator.ranked == ["valid"] * 4
    assert json.loads((tmp_path / "metrics.json").read_text())["valid"]["both"] == {"mrr": 0.2, "gain": 3.0}
    lines = stats_lines(tmp_path)
    gains = [(line["epoch"], line["valid"]["gain"]) for line in lines if "valid" in line]
    assert gains == [(0, 1.0), (1, 3.0), (2, 2.0), (3, 2.5)]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)


def test_a_measure_that_no_callback_returns(tmp_path: Path) -> None:
    run = measuring(tmp_path, [{"gains": 1.0}])
    with pytest.raises(InputError, match="evaluation.metric: 'gain'; did you mean 'gains'"):
        run.train(9)


METRICS = {"mrr": 0.25, "hits@10": 0.5}
LOSSES = {epoch * 5 + n + 1: float(n) for epoch in range(2) for n in range(5)}
"""Of two epochs of the toy run, by step."""


class Kept(Tracker):
    lives: list[Kept] = []

    def __init__(self, run: TrackedRun) -> None:
        self.run, self.logged, self.end = run, [], None
        self.id = run.earlier_id or f"kept{len(self.lives)}"
        self.lives.append(self)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.logged.append((dict(values), step))

    def finish(self, is_complete: bool) -> None:
        self.end = is_complete


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> type[Kept]:
    monkeypatch.setitem(LOGGERS._members, "kept", Kept)
    Kept.lives = []
    return Kept


def tracked_life(folder: Path, epochs: int, *names: str) -> ToyRun:
    loggers = f"training.loggers=[{','.join(names)}]"
    run = ToyRun(folder, "evaluation.valid_every_epochs=1", loggers, lrs=[0.5, 0.25])
    run.evaluator.evaluate = lambda split, *rest: SimpleNamespace(  # type: ignore[method-assign]
        to_dict=dict, figures=lambda: METRICS, both=SimpleNamespace(mrr=0.25)
    )
    run.train(epochs)
    run.trainer.evaluate("test")
    run.cluster.leave()
    run.cluster.end()
    return run


def steps(life: Kept, name: str) -> dict[int, float]:
    return {step: values[name] for values, step in life.logged if name in values}


def test_a_tracker_gets_loss_rate_speed_and_metrics_with_the_step(tmp_path: Path, kept: type[Kept]) -> None:
    tracked_life(tmp_path, 2, "kept")
    (life,) = kept.lives
    assert steps(life, "train/loss") == LOSSES
    assert steps(life, "train/epoch")[7] == pytest.approx(1.4)
    assert set(steps(life, "train/lr").values()) == {0.5}
    assert set(steps(life, "train/relation_lr").values()) == {0.25}
    assert all(speed > 0 for speed in steps(life, "train/edges_per_second").values())
    assert steps(life, "valid/mrr") == {5: 0.25, 10: 0.25}
    assert steps(life, "test/hits_at_10") == {10: 0.5}
    assert life.run.settings["training.loggers"] == '["kept"]' and life.run.settings["optimizer.lr"] == 0.1
    assert (life.run.folder, life.run.first_step, life.end) == (tmp_path, 0, True)


def test_a_resumed_run_goes_on_in_the_same_run_and_a_new_one_does_not(tmp_path, kept):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "trackers.json").write_text('{"kept": "of a run without a version"}')
    for folder, epochs in (("a", 1), ("a", 2), ("b", 1)):
        tracked_life(tmp_path / folder, epochs, "kept")
    ids = [(life.run.earlier_id, life.id) for life in kept.lives]
    assert ids == [("", "kept0"), ("kept0", "kept0"), ("", "kept2")]
    assert kept.lives[1].run.first_step == NUM_BATCHES and min(steps(kept.lives[1], "train/loss")) == 6
    (tmp_path / "a" / "trackers.json").write_text("{")
    tracked_life(tmp_path / "a", 2, "kept")
    assert kept.lives[-1].run.earlier_id == ""


def test_a_failure_ends_the_tracker_with_one_warning(tmp_path, kept, monkeypatch, caplog):
    class Broken(Kept):
        def log(self, values: Mapping[str, float], step: int) -> None:
            raise OSError(28, "No space left\non device")

    monkeypatch.setitem(LOGGERS._members, "broken", Broken)
    life = tracked_life(tmp_path, 2, "broken", "kept")
    warnings = [record.getMessage() for record in caplog.records if record.name == callbacks.__name__]
    assert warnings == ["broken: OSError: [Errno 28] No space left on device; training goes on without it"]
    assert life.num_trained == 2 * 23
    (other,) = [tracker for tracker in kept.lives if type(tracker) is Kept]
    assert other.end is True


def test_one_that_hangs_is_left_after_a_while(tmp_path, monkeypatch, caplog):
    release = threading.Event()

    class Hanging(Tracker):
        def __init__(self, run: TrackedRun) -> None:
            release.wait(60)

    monkeypatch.setitem(LOGGERS._members, "hanging", Hanging)
    monkeypatch.setattr(callbacks, "START_SECONDS", 0.1)
    monkeypatch.setattr(callbacks, "FINISH_SECONDS", 0.1)
    made = Trackers(["hanging"], {}, LeasedFolder(tmp_path))
    made.start(0, False)
    made.log({"train/loss": 1.0}, 1)
    made.finish()
    release.set()
    assert "hanging has not finished in time: its last numbers may be lost" in caplog.text


def test_an_exception_marks_the_run_as_incomplete(tmp_path: Path, kept: type[Kept]) -> None:
    made = Trackers(["kept"], {}, LeasedFolder(tmp_path))
    made.start(0, False)
    with pytest.raises(SystemExit):
        try:
            sys.exit(143)
        finally:
            made.finish()
    assert kept.lives[0].end is False


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for epochs in (1, 2):
        tracked_life(tmp_path, epochs, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [*LOSSES.items()]
    assert [(event.step, event.value) for event in events.Scalars("test/mrr")] == [(5, 0.25), (10, 0.25)]
    assert "_hparams_/session_start_info" in events.PluginTagToContent("hparams")


def test_mlflow_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    for epochs in (1, 2):
        tracked_life(tmp_path / "run", epochs, "mlflow")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("dglkge")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["optimizer.lr"] == "0.1" and run.data.metrics["test/hits_at_10"] == 0.5
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((point.step, point.value) for point in history) == [*LOSSES.items()]


def test_wandb_gets_one_run_with_the_steps_of_both_lives(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    init = mock.create_autospec(wandb.init, return_value=mock.create_autospec(wandb.Run, instance=True))
    monkeypatch.setattr(wandb, "init", init)
    for epochs in (1, 2):
        tracked_life(tmp_path / "run", epochs, "wandb")
    first, second = (call.kwargs for call in init.call_args_list)
    assert first["id"] == second["id"] and first["project"] == "mine" and first["resume"] == "allow"
    assert first["config"]["optimizer.lr"] == 0.1
    rows = [call.args[0] for call in init.return_value.log.call_args_list]
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == [*LOSSES.items()]
    assert [row["step"] for row in rows if "test/mrr" in row] == [5, 10]


def test_rank_0_alone_tracks(tmp_path: Path, kept: type[Kept]) -> None:
    config = load_config(None, ["dataset=x", "training.loggers=[kept]"])
    open_trackers(config, Cluster(World(1), None), LeasedFolder(tmp_path)).start(0, False)
    assert kept.lives == [] and not list(tmp_path.iterdir())
