"""Control of a training: stops, commits and their cadence."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dglkge.checkpoint import open_checkpoint
from dglkge.config import load_config
from dglkge.errors import CheckpointError, InputError
from dglkge.training.building.checks import check_config
from dglkge.training.cadence import Cadence
from tests.training.toy_trainer import NUM_BATCHES, ToyRun


class Averages:
    """A user's object: numbers, texts and tensors."""

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
    """Train a life of a run with an object that changes with each batch."""
    run, item = ToyRun(folder, *settings), Averages()
    run.trainer.register("averages", item)
    run.train(until, {(epoch, n): item.add for epoch in range(until) for n in range(NUM_BATCHES)})
    run.cluster.leave()
    return item


def test_a_registered_object_goes_on_where_it_was(tmp_path: Path) -> None:
    first = averaged(tmp_path, 2)
    again = averaged(tmp_path, 2)
    assert again.state["count"] == 2 * NUM_BATCHES and again.state["pair"] == (1, None)
    assert torch.equal(again.state["mean"], first.state["mean"])
    averaged(tmp_path, 3)
    # A life that does not register it hands it on.
    third = ToyRun(tmp_path)
    third.train(4)
    third.cluster.leave()
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
    run = ToyRun(tmp_path, lrs=[0.1])
    run.train(1)
    run.cluster.leave()
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
    settings = ("optimizer.warmup_batches=2",)
    run = ToyRun(tmp_path, *settings, lrs=[0.1])
    run.train(1)
    run.cluster.leave()
    with pytest.raises(CheckpointError, match="has 1 parameter groups, the optimizer has 2"):
        ToyRun(tmp_path, *settings, lrs=[0.1, 0.1])
    run.trainer._state.load(run.trainer._state.to_bytes(), "here")
    with pytest.raises(CheckpointError, match="here: not the state of this training, or damaged"):
        run.trainer._state.load(b"nothing", "here")


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


def test_an_optimizer_of_torch_with_a_scheduler_can_be_registered(tmp_path: Path) -> None:
    """A dense module of a script's own: its optimizer's moments and its schedule."""

    def registered(run: ToyRun, start: torch.Tensor) -> tuple[torch.nn.Parameter, Callable[[], None]]:
        """Return a parameter, and its step."""
        weight = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.Adam([weight], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        run.trainer.register("adam", optimizer)
        run.trainer.register("schedule", scheduler)

        def step() -> None:
            optimizer.zero_grad()
            (weight**2).sum().backward()
            optimizer.step()
            scheduler.step()

        return weight, step

    run = ToyRun(tmp_path)
    weight, step = registered(run, torch.ones(4))
    run.train(1, {(0, index): step for index in range(NUM_BATCHES)})
    run.cluster.leave()
    again, step_again = registered(ToyRun(tmp_path), weight.detach())
    for _ in range(3):
        step()
        step_again()
        assert torch.equal(weight, again)


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def policy(*settings, rank=0, clock=None, num_batches=9):
    config = load_config(None, ["dataset=x", "training.num_epochs=10", *settings])
    check_config(config)
    cluster = SimpleNamespace(world=SimpleNamespace(rank=rank))  # no sum: it exchanges nothing
    return Cadence(config, cluster, num_batches, clock or Clock())


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
    clock = Clock()
    first, second = (policy("checkpoint.every_minutes=2", rank=rank, clock=clock) for rank in (0, 1))
    commits = []
    for clock.seconds in (0, 119, 120, 130, 239, 241):
        commits.append(first.asks_after_batch(1))
        assert not second.asks_after_batch(1)
        if commits[-1]:
            first.committed()
    assert commits == [False, False, True, False, False, True]


def test_what_is_due_while_a_version_is_written_waits_for_the_next_batch():
    cadence, clock = policy("checkpoint.every_batches=3", num_batches=12), Clock()
    assert commits_of(cadence, writing=(3, 4)) == [5, 6, 9]
    cadence = policy("checkpoint.every_minutes=2", clock=clock)
    clock.seconds = 121
    assert [cadence.asks_after_batch(1, writing) for writing in (True, True, False)] == [False, False, True]


def test_epochs():
    cadence = policy("checkpoint.every_epochs=4", "checkpoint.keep_every_epochs=3")
    assert [n for n in range(1, 11) if cadence.due_after_epoch(n)] == [3, 4, 6, 8, 9, 10]
    kept = [cadence.pointers_after_epoch(n) for n in range(1, 11)]
    assert [list(pointers) for pointers in kept if pointers] == [["epoch_3"], ["epoch_6"], ["epoch_9"]]
    assert [n for n in range(1, 11) if policy("checkpoint.every_epochs=0").due_after_epoch(n)] == [10]
    best = policy("checkpoint.keep_best=true", "evaluation.valid_every_epochs=5", "checkpoint.every_epochs=0")
    assert [n for n in range(1, 11) if best.due_after_epoch(n)] == [5, 10]
