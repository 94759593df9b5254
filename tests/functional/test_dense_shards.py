"""Sharded dense parameters under the launcher: the result of one process, resumed at other sizes."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.typing import RELATION
from tests.functional import job as commands
from tests.functional.test_same_result_everywhere import stats, tables
from tests.toy_kg import toy_dataset
from tests.training.shards import NEEDS_SLICES

pytestmark = NEEDS_SLICES

SETTINGS = (
    *("model.init_scale=0.3", "training.matmul_dtype=float32", "training.batch_size=50", "dense.lr=0.01"),
    *(
        "optimizer.clip_norm=0.05",
        "optimizer.schedule={name: ExponentialLR, gamma: 0.7}",
    ),
    *("evaluation.split=none", "evaluation.valid_every_epochs=2"),
)


def model_file(run: Path) -> Path:
    """Return the newest file of relations and dense parameters."""
    checkpoint = open_checkpoint(run)
    return checkpoint.folder / checkpoint.manifest.of_table(RELATION)[0].name


def compare(dataset: Path, alone: Path, run: Path) -> None:
    """Compare losses, rankings, rows, dense parameters and their optimizer's state of two runs."""
    expected, found = stats(alone), stats(run)
    assert len(found) == len(expected)
    for one, several in zip(expected, found):
        # Of an epoch, or of a ranking of the valid split.
        assert several.get("loss", 0.0) == pytest.approx(one.get("loss", 0.0), rel=1e-4)
        assert several.get("valid", {}) == pytest.approx(one.get("valid", {}), rel=1e-2)
    of_run = tables(dataset, run)
    for name, rows in tables(dataset, alone).items():
        np.testing.assert_allclose(of_run[name], rows, rtol=1e-3, atol=1e-3, err_msg=name)
    with h5py.File(model_file(run)) as saved, h5py.File(model_file(alone)) as reference:
        names: list[str] = []
        reference["dense"].visititems(
            lambda name, item: names.append(name) if hasattr(item, "shape") else None
        )
        assert len(names) >= 4
        for name in names:
            values = saved["dense"][name][()]
            np.testing.assert_allclose(
                values, reference["dense"][name][()], rtol=1e-3, atol=1e-4, err_msg=name
            )


def test_shards_train_as_one_process_and_resume_at_any_size(tmp_path: Path) -> None:
    """Three trainers for two epochs, then two with slices of theirs; replicated ones read the same files."""
    dataset, alone, run = toy_dataset(), tmp_path / "alone", tmp_path / "run"
    # A core (7, 16, 16): slices of 3, 3 and 1 matrices on three trainers.
    settings = (f"dataset={dataset}", "model.score_function={name: tucker, relation_dimension: 7}")
    settings += (*SETTINGS, "dense.optimizer={name: AdamW, weight_decay: 0.1}", "model.dimension=16")
    done = commands.train_alone(f"output={alone}", "training.num_epochs=4", *settings)
    assert done.returncode == 0, done.stderr
    for trainers, epochs in ((3, 2), (2, 4)):
        more = (f"training.num_epochs={epochs}", "dense.sharding=fsdp", *settings)
        done = commands.train(tmp_path, trainers, f"output={run}", *more)
        assert done.returncode == 0, done.stderr
    assert not list(run.glob("tmp*"))
    compare(dataset, alone, run)
    # Nothing is left to train: one process without slices takes the files over and ranks.
    done = commands.train_alone(f"output={run}", "training.num_epochs=4", *settings, "evaluation.split=test")
    assert done.returncode == 0, done.stderr
    done = commands.train_alone(
        f"output={alone}", "training.num_epochs=4", *settings, "evaluation.split=test"
    )
    assert done.returncode == 0, done.stderr
    ours, theirs = (json.loads((one / "metrics.json").read_text())["test"]["both"] for one in (run, alone))
    assert ours == pytest.approx(theirs, rel=1e-2)


def test_layers_and_projections_of_features_in_slices(tmp_path: Path) -> None:
    """Rows of a batch are projected before its loss, with parameters that were elsewhere until then."""
    dataset, alone, run = toy_dataset(typed=True), tmp_path / "alone", tmp_path / "run"
    names = Dataset.open(dataset).vocabulary("person").names
    np.save(tmp_path / "person.npy", np.random.default_rng(0).normal(size=(len(names), 5)))
    (tmp_path / "person.names.txt").write_text("\n".join(names) + "\n")
    settings = (f"dataset={dataset}", *SETTINGS, "training.num_epochs=2", "dense.sharding=fsdp")
    settings += ("model.score_function=transformer", "model.dimension=8", "training.objective=one_vs_all")
    settings += (f"features.files=[person={tmp_path / 'person.npy'}]", "features.mlp={}")
    settings += ("dense.optimizer={name: SGD, momentum: 0.9}",)
    done = commands.train_alone(f"output={alone}", *settings)
    assert done.returncode == 0, done.stderr
    # The stand-in for a GPU: it computes with a copy of the layers, filled from slices before each batch.
    done = commands.train(tmp_path, 2, f"output={run}", "training.device=cpu_staged", *settings)
    assert done.returncode == 0, done.stderr
    compare(dataset, alone, run)
