"""Sharded dense parameters under the launcher: the result of one process, resumed at other sizes."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.typing import RELATION
from tests.functional import job as commands
from tests.functional.results import assert_near, assert_same_training, metrics, stats
from tests.functional.test_same_result_everywhere import write_features
from tests.toy_kg import toy_dataset
from tests.training.shards import NEEDS_SLICES

pytestmark = NEEDS_SLICES

SETTINGS = (
    *("model.init_scale=0.3", "training.matmul_dtype=float32", "training.batch_size=50", "dense.lr=0.01"),
    *("optimizer.clip_norm=0.05", "optimizer.schedule={name: ExponentialLR, gamma: 0.7}"),
    *("evaluation.split=none", "evaluation.valid_every_epochs=2"),
)


def dense_file(run: Path) -> dict[str, np.ndarray]:
    """Return the dense parameters and their optimizer's state as the newest file has them."""
    checkpoint, found = open_checkpoint(run), {}
    with h5py.File(checkpoint.folder / checkpoint.manifest.of_table(RELATION)[0].name) as file:
        file["dense"].visititems(
            lambda name, item: found.update({name: item[()]}) if hasattr(item, "shape") else None
        )
    return found


def compare(alone: Path, run: Path) -> None:
    """Compare losses, rankings, parameters and the state of the dense optimizer of two runs."""
    assert_same_training(run, alone, atol=1e-3)
    rankings = [[record["valid"] for record in stats(one) if "valid" in record] for one in (run, alone)]
    assert rankings[0] and rankings[0] == [pytest.approx(ranking, rel=1e-2) for ranking in rankings[1]]
    found, expected = (dense_file(one) for one in (run, alone))
    assert len(expected) >= 4
    assert_near(found, expected, 1e-3, 1e-4)


def test_shards_train_as_one_process_and_resume_at_any_size(tmp_path: Path) -> None:
    """Three trainers for two epochs, then two with slices of theirs; replicated ones read the same files."""
    dataset, alone, run = toy_dataset(), tmp_path / "alone", tmp_path / "run"
    # A core (7, 16, 16): slices of 3, 3 and 1 matrices on three trainers.
    settings = (f"dataset={dataset}", "model.score_function={name: tucker, relation_dimension: 7}")
    settings += (*SETTINGS, "dense.optimizer={name: AdamW, weight_decay: 0.1}", "model.dimension=16")
    commands.train_alone(f"output={alone}", "training.num_epochs=4", *settings)
    for trainers, epochs in ((3, 2), (2, 4)):
        more = (f"training.num_epochs={epochs}", "dense.sharding=fsdp", *settings)
        commands.train(tmp_path, trainers, f"output={run}", *more)
    assert not list(run.glob("tmp*"))
    compare(alone, run)
    # Nothing is left to train: one process without slices takes the files over and ranks.
    for one in (run, alone):
        commands.train_alone(f"output={one}", "training.num_epochs=4", *settings, "evaluation.split=test")
    assert metrics(run)["both"] == pytest.approx(metrics(alone)["both"], rel=1e-2)


def test_layers_and_projections_of_features_in_slices(tmp_path: Path) -> None:
    """Rows of a batch are projected before its loss, with parameters that were elsewhere until then."""
    dataset, alone, run = toy_dataset(typed=True), tmp_path / "alone", tmp_path / "run"
    settings = (f"dataset={dataset}", *SETTINGS, "training.num_epochs=2", "dense.sharding=fsdp")
    settings += ("model.score_function=transformer", "model.dimension=8", "training.objective=one_vs_all")
    settings += (write_features(tmp_path, dataset), "features.mlp={}")
    settings += ("dense.optimizer={name: SGD, momentum: 0.9}",)
    commands.train_alone(f"output={alone}", *settings)
    # The stand-in for a GPU: it computes with a copy of the layers, filled from slices before each batch.
    commands.train(tmp_path, 2, f"output={run}", "training.device=cpu_staged", *settings)
    compare(alone, run)
