"""Early stopping: rankings without a gain, and runs that end with their best version."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.config.schema import EarlyStoppingConfig
from dglkge.distributed.preemption import Preempted
from dglkge.training.cadence import EarlyStopping
from tests.training.toy_trainer import NUM_BATCHES, NUM_TRIPLES, ToyRun

PATIENT = (
    "evaluation.valid_every_epochs=1",
    "training.early_stopping.patience=2",
    "training.num_epochs=9",
    "optimizer.schedule={name: StepLR, step_size: 1, gamma: 0.5}",
    "optimizer.warmup_batches=2",
)


def ended_after(patience: int, min_gain: float, scores: list[float]) -> int | None:
    """Return how many rankings end the training, None if they do not."""
    settings = EarlyStoppingConfig(patience=patience, min_gain=min_gain)
    stopping = EarlyStopping(settings)
    for number, score in enumerate(scores, 1):
        again = EarlyStopping(settings)
        again.load_state_dict(stopping.state_dict())
        stopping = again
        stopping.add(score)
        if stopping.is_over:
            return number
    return None


@pytest.mark.parametrize(
    ("patience", "min_gain", "scores", "number"),
    [
        (1, 0.0, [0.1, 0.2, 0.3], None),
        (1, 0.0, [0.1, 0.2, 0.2], 3),
        (2, 0.0, [0.1, 0.05, 0.2, 0.1, 0.15, 0.3], 5),
        (2, 0.1, [0.1, 0.15, 0.19, 0.3], 3),
        (3, 0.1, [0.1, 0.15, 0.19, 0.21, 0.2, 0.2, 0.2], 7),
        (2, 0.0, [math.nan, 0.1, math.nan, 0.2, math.nan, math.nan], 6),
        (2, 0.0, [math.nan, math.nan], 2),
    ],
)
def test_patience(patience: int, min_gain: float, scores: list[float], number: int | None) -> None:
    assert ended_after(patience, min_gain, scores) == number


def life(folder: Path, scores: list[float], *settings: str) -> ToyRun:
    """Return a life of the patient run, in which rankings have these results."""
    run = ToyRun(folder, *PATIENT, *settings, own_config=True, lrs=[0.4, 0.1])
    run.evaluator.mrr = iter(scores)
    return run


def metrics(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def test_the_best_version_is_restored_and_committed(tmp_path: Path) -> None:
    run = life(tmp_path, [0.1, 0.3, 0.2, 0.25])
    run.train(9)
    assert run.evaluator.ranked == ["valid"] * 4 and len(run.trained) == 4 * NUM_BATCHES
    assert run.num_trained == 2 * NUM_TRIPLES  # the tables are those of the second epoch
    run.trainer.evaluate("test")
    run.cluster.leave()
    assert run.committed() == (2, 0) and "test" in metrics(tmp_path)
    progress = open_checkpoint(tmp_path).meta.progress
    assert (progress["finished_epochs"], progress["ended_after"]) == (2, 4)
    open_checkpoint(tmp_path).verify()
    again = life(tmp_path, [])
    assert (again.epochs.finished(), again.num_trained) == (2, 2 * NUM_TRIPLES)
    again.train(9)
    again.cluster.leave()
    assert again.trained == [] and again.evaluator.ranked == []


def test_the_best_is_restored_where_all_epochs_were_trained(tmp_path: Path) -> None:
    run = life(tmp_path, [0.1, 0.3, 0.2], "training.num_epochs=3")
    run.train(3)
    assert run.committed() == (2, 0) and run.num_trained == 2 * NUM_TRIPLES
    last = life(tmp_path / "last", [0.1, 0.2, 0.3], "training.num_epochs=3")
    last.train(3)
    assert last.committed() == (3, 0) and last.num_trained == 3 * NUM_TRIPLES


@pytest.mark.parametrize(
    "settings", [("training.num_epochs=9", "training.early_stopping.patience=3"), ("training.num_epochs=9",)]
)
def test_more_epochs_or_patience_continue_from_the_best_version(tmp_path: Path, settings) -> None:
    """With the learning rates and the patience that it had: the same as one run with those settings."""
    scores = [0.1, 0.3, 0.2, 0.25, 0.4, 0.39, 0.38, 0.37, 0.36]
    first = "training.num_epochs=9" if len(settings) == 2 else "training.num_epochs=3"
    run = life(tmp_path / "parts", scores, first)
    run.train(9)
    run.cluster.leave()
    assert run.committed() == (2, 0)
    rest = life(tmp_path / "parts", scores[2:], *settings)
    rest.train(9)
    rest.cluster.leave()
    whole = life(tmp_path / "whole", scores, *settings)
    whole.train(9)
    whole.cluster.leave()
    assert run.lrs_of_batches[: 2 * NUM_BATCHES] + rest.lrs_of_batches == whole.lrs_of_batches
    assert rest.committed() == whole.committed() == ((5, 0) if len(settings) == 2 else (2, 0))
    assert rest.num_trained == whole.num_trained


def test_an_epoch_that_is_left_by_break_may_end_the_training(tmp_path: Path) -> None:
    """Its ranking comes with the next batches, of which there are then none."""
    run = life(tmp_path, [0.3, 0.2, 0.1])
    epochs = []
    for _ in range(5):
        for epoch in run.epochs.remaining_until(9):
            epochs.append(epoch)
            for batch in run.trainer.batches():
                run.trainer.step(batch)
            break
    assert epochs == [0, 1, 2, 3] and run.evaluator.ranked == ["valid"] * 3
    assert len(run.trained) == 3 * NUM_BATCHES
    run.cluster.leave()
    assert run.committed() == (1, 0) and run.num_trained == NUM_TRIPLES


@pytest.mark.parametrize("stop", [1, 7, 10, 4 * NUM_BATCHES - 1])
def test_a_stop_at_any_batch_changes_nothing(tmp_path: Path, stop: int) -> None:
    """The patience, the best version and the learning rates of all lives together are those of one."""
    scores = [0.1, 0.3, 0.2, 0.25]
    whole = life(tmp_path / "whole", scores)
    whole.train(9)
    first = life(tmp_path / "parts", scores)
    with first.cluster.stop.listening(), pytest.raises(Preempted):
        for _ in first.epochs.remaining_until(9):
            for batch in first.trainer.batches():
                first.trainer.step(batch)
                if len(first.trained) == stop:
                    signal.raise_signal(signal.SIGTERM)
    first.cluster.leave()
    second = life(tmp_path / "parts", scores[len(first.evaluator.ranked) :])
    second.train(9)
    second.cluster.leave()
    assert first.lrs_of_batches + second.lrs_of_batches == whole.lrs_of_batches
    assert first.evaluator.ranked + second.evaluator.ranked == whole.evaluator.ranked
    assert second.committed() == (2, 0) and second.num_trained == whole.num_trained
