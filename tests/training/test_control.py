"""Control of a training: registered objects, cadence of commits, early stopping."""

from __future__ import annotations

import io
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.config import load_config
from dglkge.config.schema import EarlyStoppingConfig
from dglkge.distributed.preemption import Preempted
from dglkge.errors import CheckpointError, InputError
from dglkge.training.building.checks import check_config
from dglkge.training.cadence import Cadence, EarlyStopping
from tests.training.toy_trainer import NUM_BATCHES, NUM_TRIPLES, ToyRun


class Averages:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"count": 0, "mean": torch.zeros(3), "names": ["a"], "pair": (1, None)}

    def add(self) -> None:
        self.state["count"] += 1
        self.state["mean"] = self.state["mean"] + 0.1

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def averaged(folder: Path, until: int, *settings: str) -> Averages:
    run, item = ToyRun(folder, *settings), Averages()
    run.trainer.register("averages", item)
    run.finish(until, {(epoch, n): item.add for epoch in range(until) for n in range(NUM_BATCHES)})
    return item


def test_a_registered_object_goes_on_where_it_was(tmp_path: Path) -> None:
    first = averaged(tmp_path, 2)
    again = averaged(tmp_path, 2)
    assert again.state["count"] == 2 * NUM_BATCHES and again.state["pair"] == (1, None)
    assert torch.equal(again.state["mean"], first.state["mean"])
    averaged(tmp_path, 3)
    # A life that does not register it hands it on.
    ToyRun(tmp_path).finish(4)
    assert averaged(tmp_path, 4).state["count"] == 3 * NUM_BATCHES


def test_the_file_belongs_to_the_version_and_is_read_without_code(tmp_path: Path) -> None:
    averaged(tmp_path, 2, "checkpoint.keep_every_epochs=1")
    folder = tmp_path / "checkpoint"
    manifest = open_checkpoint(tmp_path).manifest
    assert manifest.state is not None and manifest.state.name == "training_state.pt"
    assert manifest.state in manifest.binary_files
    for version in (1, 2):
        saved = torch.load(folder / f"v{version}" / "training_state.pt", weights_only=True)
        assert saved["object:averages"]["count"] == version * NUM_BATCHES
    open_checkpoint(folder / "epoch_1").verify()


def test_a_run_that_changes_nothing_else_has_no_file(tmp_path: Path, caplog) -> None:
    ToyRun(tmp_path, lrs=[0.1]).finish(1)
    assert open_checkpoint(tmp_path).manifest.state is None
    assert not list((tmp_path / "checkpoint").rglob("training_state*"))
    with caplog.at_level(logging.WARNING):
        averaged(tmp_path, 1)
    assert "the checkpoint has no state of 'averages'" in caplog.text


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_file_is_found_and_the_version_before_is_taken(tmp_path: Path, damage: str) -> None:
    averaged(tmp_path, 2, "checkpoint.keep_every_epochs=1")
    path = tmp_path / "checkpoint" / "v2" / "training_state.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[:-1])
    with pytest.raises(CheckpointError, match="v2/training_state.pt"):
        ToyRun(tmp_path)
    assert averaged(tmp_path, 1, "checkpoint.fallback=true").state["count"] == NUM_BATCHES


def test_a_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    state = ToyRun(tmp_path, "optimizer.warmup_batches=2", lrs=[0.1]).finish(1).trainer._state
    with pytest.raises(CheckpointError, match="has 1 parameter groups, the optimizer has 2"):
        ToyRun(tmp_path, "optimizer.warmup_batches=2", lrs=[0.1, 0.1])
    state.load(state.to_bytes(), "here")
    with pytest.raises(CheckpointError, match="here: not the state of this training, or damaged"):
        state.load(b"nothing", "here")


def test_refused_objects(tmp_path: Path) -> None:
    trainer = ToyRun(tmp_path).trainer
    trainer.register("it", Averages())
    item = Averages()
    item.state["code"] = io.BytesIO
    for name, wrong, message in (
        ("it", Averages(), "trainer.register: 'it' is registered already; allowed: each name once"),
        ("", Averages(), "trainer.register: the name is ''; allowed: a non-empty text"),
        ("dict", {}, "'dict' is a dict without state_dict and load_state_dict; allowed: an object with both"),
        ("code", item, "trainer.register: the state of 'code' cannot be saved: allowed are dicts, lists"),
    ):
        with pytest.raises(InputError) as caught:
            trainer.register(name, wrong)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def policy(*settings, rank=0, clock=lambda: 0.0, num_batches=9):
    config = load_config(None, ["dataset=x", "training.num_epochs=10", *settings])
    check_config(config)
    cluster = SimpleNamespace(world=SimpleNamespace(rank=rank))  # no sum: it exchanges nothing
    return Cadence(config, cluster, num_batches, clock)


def commits_of(cadence, writing=()):
    """Return after which batches of an epoch it commits, while others' versions are being written."""
    commits = []
    for n in range(1, cadence.num_batches):
        if cadence.asks_after_batch(n, is_writing=n in writing):
            commits.append(n)
            cadence.committed()
    return commits


def test_batches():
    cadence = policy("checkpoint.every_batches=3")
    assert commits_of(cadence) == [3, 6] and not cadence.asks_after_batch(9)  # the 9th ends the epoch
    assert [n for n in range(1, 10) if cadence.counts(n)] == [3, 6, 9]
    assert commits_of(policy()) == [] and not any(policy().counts(n) for n in range(1, 10))


def test_minutes_are_those_of_rank_0():
    now, commits = [0.0], []
    minutes = "checkpoint.every_minutes=2"
    first, second = (policy(minutes, rank=rank, clock=lambda: now[0]) for rank in (0, 1))
    for now[0] in (0, 119, 120, 130, 239, 241):
        commits.append(first.asks_after_batch(1))
        assert not second.asks_after_batch(1)
        if commits[-1]:
            first.committed()
    assert commits == [False, False, True, False, False, True]


def test_what_is_due_while_a_version_is_written_waits_for_the_next_batch():
    cadence, now = policy("checkpoint.every_batches=3", num_batches=12), [0.0]
    assert commits_of(cadence, writing=(3, 4)) == [5, 6, 9]
    cadence = policy("checkpoint.every_minutes=2", clock=lambda: now[0])
    now[0] = 121
    assert [cadence.asks_after_batch(1, writing) for writing in (True, True, False)] == [False, False, True]


def test_epochs():
    cadence = policy("checkpoint.every_epochs=4", "checkpoint.keep_every_epochs=3")
    assert [n for n in range(1, 11) if cadence.due_after_epoch(n)] == [3, 4, 6, 8, 9, 10]
    kept = [cadence.pointers_after_epoch(n) for n in range(1, 11)]
    assert [list(pointers) for pointers in kept if pointers] == [["epoch_3"], ["epoch_6"], ["epoch_9"]]
    assert [n for n in range(1, 11) if policy("checkpoint.every_epochs=0").due_after_epoch(n)] == [10]
    best = policy("checkpoint.keep_best=true", "evaluation.valid_every_epochs=5", "checkpoint.every_epochs=0")
    assert [n for n in range(1, 11) if best.due_after_epoch(n)] == [5, 10]


PATIENT = (
    "evaluation.valid_every_epochs=1",
    "training.early_stopping.patience=2",
    "training.num_epochs=9",
    "optimizer.schedule={name: StepLR, step_size: 1, gamma: 0.5}",
    "optimizer.warmup_batches=2",
)


@pytest.mark.parametrize(("patience", "min_gain", "scores", "number"), [
    (1, 0.0, [0.1, 0.2, 0.3], None),
    (1, 0.0, [0.1, 0.2, 0.2], 3),
    (2, 0.1, [0.1, 0.15, 0.19, 0.3], 3),
    (3, 0.1, [0.1, 0.15, 0.19, 0.21, 0.2, 0.2, 0.2], 7),
    (2, 0.0, [math.nan, 0.1, math.nan, 0.2, math.nan, math.nan], 6),
])  # fmt: skip
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
    return ToyRun(folder, *PATIENT, *settings, own_config=True, lrs=[0.4, 0.1], mrr=scores)


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
    again = life(tmp_path, []).finish(9)
    assert (again.epochs.finished, again.num_trained) == (2, 2 * NUM_TRIPLES)
    assert again.trained == [] and again.evaluator.ranked == []


def test_the_best_is_restored_where_all_epochs_were_trained(tmp_path: Path) -> None:
    for name, scores, best in (("second", [0.1, 0.3, 0.2], 2), ("last", [0.1, 0.2, 0.3], 3)):
        run = life(tmp_path / name, scores, "training.num_epochs=3").finish(3)
        assert run.committed() == (best, 0) and run.num_trained == best * NUM_TRIPLES


def test_an_open_epoch_is_not_the_last_of_fewer_epochs(tmp_path: Path) -> None:
    scores = [0.1, 0.2, 0.3, 0.25]
    run = life(tmp_path / "parts", scores, "training.num_epochs=4")
    run.stop(2, 2)
    with pytest.raises(Preempted):
        run.train(4)
    run.cluster.leave()
    assert run.committed()[0] == 2 and run.committed()[1] > 0
    life(tmp_path / "parts", [], "training.num_epochs=2").finish(2)
    rest = life(tmp_path / "parts", scores[2:], "training.num_epochs=4").finish(4)
    whole = life(tmp_path / "whole", scores, "training.num_epochs=4").finish(4)
    assert rest.committed() == whole.committed() == (3, 0) and rest.num_trained == whole.num_trained


@pytest.mark.parametrize(("first", "more", "best"), [
    (["training.num_epochs=9"], ["training.num_epochs=9", "training.early_stopping.patience=3"], 5),
    (["training.num_epochs=3"], ["training.num_epochs=9"], 2),
    (["training.num_epochs=4"], ["training.num_epochs=9"], 2),  # patience ends with the epochs
])  # fmt: skip
def test_more_epochs_or_patience_continue_from_the_best_version(tmp_path: Path, first, more, best) -> None:
    """With the learning rates and the patience that it had: the same as one run with those settings."""
    scores = [0.1, 0.3, 0.2, 0.25, 0.4, 0.39, 0.38, 0.37, 0.36]
    run = life(tmp_path / "parts", scores, *first).finish(9)
    assert run.committed() == (2, 0)
    rest = life(tmp_path / "parts", scores[2:], *more).finish(9)
    whole = life(tmp_path / "whole", scores, *more).finish(9)
    assert run.lrs_of_batches[: 2 * NUM_BATCHES] + rest.lrs_of_batches == whole.lrs_of_batches
    assert rest.committed() == whole.committed() == (best, 0)
    assert rest.num_trained == whole.num_trained


def test_an_epoch_that_is_left_by_break_may_end_the_training(tmp_path: Path) -> None:
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
    scores = [0.1, 0.3, 0.2, 0.25]
    whole = life(tmp_path / "whole", scores).finish(9)
    first = life(tmp_path / "parts", scores)
    first.stop(*stop, until=9)
    first.cluster.leave()
    second = life(tmp_path / "parts", scores[len(first.evaluator.ranked) :]).finish(9)
    assert first.lrs_of_batches + second.lrs_of_batches == whole.lrs_of_batches
    assert first.evaluator.ranked + second.evaluator.ranked == whole.evaluator.ranked
    assert second.committed() == (2, 0) and second.num_trained == whole.num_trained
