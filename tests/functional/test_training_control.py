"""Schedule, clipping, early stopping and a registered object through stops and other sizes of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.checkpoint.reader import open_checkpoint
from tests import warm
from tests.functional import job as commands
from tests.functional.results import datasets
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
TABLE_TOLERANCE = 5e-4
"""Absolute, as in test_elastic_job."""


def live(folder: Path, num_trainers: int, stop_at: tuple[int, int] | None = None) -> None:
    """Run the script until its end, or until it stops itself; 0 trainers: plain python."""
    (folder / "hold").unlink(missing_ok=True)
    if stop_at is not None:
        epoch, index = stop_at
        (folder / "hold").write_text(f"{epoch} {index} {max(0, num_trainers - 1)} signal")
    words = [SCRIPT, *commands.sets((f"dataset={toy_dataset()}", f"output={folder / 'run'}", *SETTINGS))]
    command = [*warm.python(), *words]
    if num_trainers:
        command = commands.launch_command(folder, num_trainers, (), script=words)
    commands.run(command, 0 if stop_at is None else 143, folder)


def content(run: Path) -> dict[str, Any]:
    """Return all rows and all state of the newest version, the state of training, and the results."""
    contents: dict[str, Any] = dict(datasets(run))
    checkpoint = open_checkpoint(run, verify=True)
    state = checkpoint.manifest.state
    assert state is not None
    contents["training"] = torch.load(checkpoint.folder / state.name, weights_only=True)
    contents["progress"] = dict(checkpoint.meta.progress)
    contents["metrics"] = json.loads((run / "metrics.json").read_text())
    return contents


def assert_same(actual: dict[str, Any], expected: dict[str, Any], is_exact: bool) -> None:
    """Hold that two runs have ended alike."""
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        if isinstance(values, np.ndarray):
            if is_exact:
                np.testing.assert_array_equal(actual[name], values, err_msg=name)
            else:
                np.testing.assert_allclose(actual[name], values, rtol=0, atol=TABLE_TOLERANCE, err_msg=name)
    averages = [run["training"].pop("object:averages")["total"] for run in (actual, expected)]
    assert torch.equal(*averages)
    assert actual["progress"] == expected["progress"]
    if is_exact:
        assert actual["training"] == expected["training"]
        scores = [run["metrics"]["test"]["both"]["mrr"] for run in (actual, expected)]
        assert scores[0] == scores[1]
    for key in ("num_batches", "num_epochs", "param_groups", "schedule"):
        assert actual["training"]["learning_rates"][key] == expected["training"]["learning_rates"][key]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    live(folder, 0)
    return folder / "run"


def test_one_process_ends_with_its_best_version(alone: Path) -> None:
    result = content(alone)
    assert result["progress"]["ended_after"] == 3
    best = json.loads((alone / "checkpoint" / "best").read_text())
    assert result["progress"]["finished_epochs"] == best["finished_epochs"]
    assert result["metrics"]["valid"]["both"]["mrr"] == best["score"]
    assert result["training"]["learning_rates"]["num_batches"] == best["finished_epochs"] * BATCHES_PER_EPOCH
    assert [group["lr"] for group in result["training"]["learning_rates"]["param_groups"]] != [0.1, 0.05]


def test_stops_of_one_process_change_no_bit(alone: Path, tmp_path: Path) -> None:
    for place in ((0, BATCHES_PER_EPOCH - 1), (1, 2)):
        live(tmp_path, 0, place)
    live(tmp_path, 0)
    assert_same(content(tmp_path / "run"), content(alone), is_exact=True)
    # A start after the end trains nothing.
    live(tmp_path, 0)
    assert_same(content(tmp_path / "run"), content(alone), is_exact=True)


def test_stops_of_two_trainers_change_no_bit_and_sizes_only_the_order_of_sums(alone, tmp_path):
    folders = [tmp_path / name for name in ("whole", "stopped", "resized")]
    for folder in folders:
        folder.mkdir()
    whole, stopped, resized = folders
    live(whole, 2)
    live(stopped, 2, (1, BATCHES_PER_EPOCH - 1))
    live(stopped, 2)
    assert_same(content(stopped / "run"), content(whole / "run"), is_exact=True)
    assert_same(content(whole / "run"), content(alone), is_exact=False)
    live(resized, 2, (0, 2))
    live(resized, 0)
    assert_same(content(resized / "run"), content(alone), is_exact=False)
