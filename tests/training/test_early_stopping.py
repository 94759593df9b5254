"""Early stopping: rankings without a gain, and runs that end with their best version."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.config.schema import EarlyStoppingConfig
from dglkge.training.cadence import EarlyStopping
from tests.training.toy_trainer import NUM_BATCHES, NUM_TRIPLES, ToyRun

PATIENT = (
    "evaluation.valid_every_epochs=1",
    "training.early_stopping.patience=2",
    "training.num_epochs=9",
    "optimizer.schedule={name: StepLR, step_size: 1, gamma: 0.5}",
    "optimizer.warmup_batches=2",
)


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
    """The ranking that ends the training, with the state saved and loaded after each."""
    settings = EarlyStoppingConfig(patience=patience, min_gain=min_gain)
    stopping, ended_after = EarlyStopping(settings), []
    for count, score in enumerate(scores, 1):
        state = stopping.state_dict()
        stopping = EarlyStopping(settings)
        stopping.load_state_dict(state)
        stopping.add(score)
        ended_after += [count] if stopping.is_over else []
    assert ended_after[:1] == ([] if number is None else [number])


def life(folder: Path, scores: list[float], *settings: str) -> ToyRun:
    """Return a life of the patient run, in which rankings have these results."""
    run = ToyRun(folder, *PATIENT, *settings, own_config=True, lrs=[0.4, 0.1])
    run.evaluator.mrr = iter(scores)
    return run


def trained(folder: Path, scores: list[float], *settings: str) -> ToyRun:
    """Return a life that has come to its end."""
    run = life(folder, scores, *settings)
    run.train(9)
    run.cluster.leave()
    return run


def test_the_best_version_is_restored_and_committed(tmp_path: Path) -> None:
    run = life(tmp_path, [0.1, 0.3, 0.2, 0.25])
    run.train(9)
    assert run.evaluator.ranked == ["valid"] * 4 and len(run.trained) == 4 * NUM_BATCHES
    assert run.num_trained == 2 * NUM_TRIPLES  # the tables are those of the second epoch
    run.trainer.evaluate("test")
    run.cluster.leave()
    assert run.committed() == (2, 0) and "test" in json.loads((tmp_path / "metrics.json").read_text())
    progress = open_checkpoint(tmp_path).meta.progress
    assert (progress["finished_epochs"], progress["ended_after"]) == (2, 4)
    open_checkpoint(tmp_path).verify()
    again = trained(tmp_path, [])
    assert (again.epochs.finished(), again.num_trained) == (2, 2 * NUM_TRIPLES)
    assert again.trained == [] and again.evaluator.ranked == []


def test_the_best_is_restored_where_all_epochs_were_trained(tmp_path: Path) -> None:
    for name, scores, best in (("second", [0.1, 0.3, 0.2], 2), ("last", [0.1, 0.2, 0.3], 3)):
        run = life(tmp_path / name, scores, "training.num_epochs=3")
        run.train(3)
        assert run.committed() == (best, 0) and run.num_trained == best * NUM_TRIPLES


@pytest.mark.parametrize(
    ("first", "more", "best"),
    [
        (["training.num_epochs=9"], ["training.num_epochs=9", "training.early_stopping.patience=3"], 5),
        (["training.num_epochs=3"], ["training.num_epochs=9"], 2),
    ],
)
def test_more_epochs_or_patience_continue_from_the_best_version(tmp_path: Path, first, more, best) -> None:
    """With the learning rates and the patience that it had: the same as one run with those settings."""
    scores = [0.1, 0.3, 0.2, 0.25, 0.4, 0.39, 0.38, 0.37, 0.36]
    run = trained(tmp_path / "parts", scores, *first)
    assert run.committed() == (2, 0)
    rest = trained(tmp_path / "parts", scores[2:], *more)
    whole = trained(tmp_path / "whole", scores, *more)
    assert run.lrs_of_batches[: 2 * NUM_BATCHES] + rest.lrs_of_batches == whole.lrs_of_batches
    assert rest.committed() == whole.committed() == (best, 0)
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


@pytest.mark.parametrize("stop", [(0, 0), (1, 1), (1, NUM_BATCHES - 1), (3, NUM_BATCHES - 2)])
def test_a_stop_at_any_batch_changes_nothing(tmp_path: Path, stop: tuple[int, int]) -> None:
    """The patience, the best version and the learning rates of all lives together are those of one."""
    scores = [0.1, 0.3, 0.2, 0.25]
    whole = trained(tmp_path / "whole", scores)
    first = life(tmp_path / "parts", scores)
    first.stop(*stop, until=9)
    first.cluster.leave()
    second = trained(tmp_path / "parts", scores[len(first.evaluator.ranked) :])
    assert first.lrs_of_batches + second.lrs_of_batches == whole.lrs_of_batches
    assert first.evaluator.ranked + second.evaluator.ranked == whole.evaluator.ranked
    assert second.committed() == (2, 0) and second.num_trained == whole.num_trained
