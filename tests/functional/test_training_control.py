"""Schedule, clipping, early stopping and a registered object through stops and other sizes of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dglkge.checkpoint.reader import open_checkpoint
from tests import warm
from tests.functional import job as commands
from tests.functional.results import assert_near, datasets, metrics
from tests.toy_kg import toy_dataset

SCRIPT = str(Path(__file__).with_name("elastic_train.py"))
SETTINGS = (
    *("model.dimension=16", "model.init_scale=0.1", "negatives.num_uniform=20", "negatives.chunk_size=16"),
    *("training.batch_size=32", "training.num_epochs=6", "optimizer.name=row_adagrad"),
    *("optimizer.relations.name=sparse_adagrad", "optimizer.relations.lr=0.05", "optimizer.clip_norm=0.05"),
    *("optimizer.clip_value=0.02", "optimizer.schedule={name: CosineAnnealingLR, T_max: 40}"),
    *("optimizer.schedule.every=batch", "optimizer.warmup_batches=8", "evaluation.valid_every_epochs=1"),
    "training.early_stopping.patience=2",
    # More than an MRR can gain: the third ranking ends the training.
    "training.early_stopping.min_gain=1",
)
BATCHES_PER_EPOCH = 6


def live(folder: Path, num_trainers: int, stop_at: tuple[int, int] | None = None) -> Path:
    """Run the script until its end, or until it stops itself; 0 trainers: plain python. Returns the run."""
    folder.mkdir(exist_ok=True)
    (folder / "hold").unlink(missing_ok=True)
    if stop_at is not None:
        epoch, index = stop_at
        (folder / "hold").write_text(f"{epoch} {index} {max(0, num_trainers - 1)} signal")
    words = [SCRIPT, *commands.sets((f"dataset={toy_dataset()}", f"output={folder / 'run'}", *SETTINGS))]
    command = [*warm.python(), *words]
    if num_trainers:
        command = commands.launch_command(folder, num_trainers, (), script=words)
    commands.run(command, 0 if stop_at is None else 143, folder)
    return folder / "run"


def training_state(run: Path) -> dict[str, Any]:
    """Return the state of training in the newest version, and its progress."""
    checkpoint = open_checkpoint(run, verify=True)
    state = checkpoint.manifest.state
    assert state is not None
    content = torch.load(checkpoint.folder / state.name, weights_only=True)
    content["object:averages"] = content["object:averages"]["total"].tolist()
    return {**content, "progress": dict(checkpoint.meta.progress)}


def assert_same(run: Path, expected_run: Path, is_exact: bool) -> None:
    """Hold that two runs have ended alike, bit by bit or but for sums in another order."""
    assert_near(datasets(run), datasets(expected_run), 0, 0 if is_exact else 5e-4)
    state, expected = training_state(run), training_state(expected_run)
    for name in ("object:averages", "progress"):
        assert state[name] == expected[name]
    for name in ("num_batches", "num_epochs", "param_groups", "schedule"):
        assert state["learning_rates"][name] == expected["learning_rates"][name]
    if is_exact:
        assert state == expected
        assert metrics(run)["both"]["mrr"] == metrics(expected_run)["both"]["mrr"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return live(tmp_path_factory.mktemp("alone"), 0)


def test_one_process_ends_with_its_best_version(alone: Path) -> None:
    state, best = training_state(alone), json.loads((alone / "checkpoint" / "best").read_text())
    assert state["progress"]["ended_after"] == 3
    assert state["progress"]["finished_epochs"] == best["finished_epochs"]
    assert metrics(alone, "valid")["both"]["mrr"] == best["score"]
    rates = state["learning_rates"]
    assert rates["num_batches"] == best["finished_epochs"] * BATCHES_PER_EPOCH
    assert [group["lr"] for group in rates["param_groups"]] != [0.1, 0.05]


def test_stops_of_two_trainers_change_no_bit_and_sizes_only_the_order_of_sums(alone, tmp_path):
    whole = live(tmp_path / "whole", 2)
    live(tmp_path / "stopped", 2, (1, BATCHES_PER_EPOCH - 1))
    assert_same(live(tmp_path / "stopped", 2), whole, is_exact=True)
    assert_same(whole, alone, is_exact=False)
    live(tmp_path / "resized", 2, (0, BATCHES_PER_EPOCH - 1))
    live(tmp_path / "resized", 0, (1, 2))
    assert_same(live(tmp_path / "resized", 0), alone, is_exact=False)
    # A start after the end trains nothing.
    before = datasets(tmp_path / "resized" / "run")
    assert_near(datasets(live(tmp_path / "resized", 0)), before, 0, 0)
