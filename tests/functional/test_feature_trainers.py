"""Projected features under the launcher: one process, and two hosts with a trainer each, train the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.data.dataset import Dataset
from tests.functional import job as commands
from tests.functional.simulated_hosts import train_on_hosts
from tests.functional.test_same_result_everywhere import stats, tables
from tests.toy_kg import toy_dataset

SETTINGS = (
    *(
        "model.score_function=complex",
        "model.dimension=8",
        "model.init_scale=0.3",
        "model.entity_dropout=0.1",
    ),
    *("features.mlp={}", "features.mlp.hidden=6", "dense.lr=0.01", "regularizer.name=none"),
    *("training.matmul_dtype=float32", "training.num_epochs=2", "training.batch_size=50"),
    *("training.objective=one_vs_all", "optimizer.clip_norm=0.5", "evaluation.split=none"),
)


def test_projections_do_not_depend_on_trainers_and_hosts(tmp_path: Path) -> None:
    dataset, on_two = toy_dataset(typed=True), toy_dataset(2, True, "metis")
    names = Dataset.open(dataset).vocabulary("person").names
    np.save(tmp_path / "person.npy", np.random.default_rng(0).normal(size=(len(names), 5)))
    (tmp_path / "person.names.txt").write_text("\n".join(names) + "\n")
    settings = (*SETTINGS, f"features.files=[person={tmp_path / 'person.npy'}]")
    alone, hosts = tmp_path / "alone", tmp_path / "hosts"
    done = commands.train_alone(f"dataset={dataset}", f"output={alone}", *settings)
    assert done.returncode == 0, done.stderr
    assert "features of person from" in done.stdout + done.stderr
    train_on_hosts(tmp_path / "job", on_two, 1, f"output={hosts}", *settings)
    for one, several in zip(stats(alone), stats(hosts), strict=True):
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-4)
    found = tables(on_two, hosts)
    for name, rows in tables(dataset, alone).items():
        np.testing.assert_allclose(found[name], rows, rtol=1e-3, atol=1e-3, err_msg=name)
    of_hosts = open_checkpoint(hosts).feature_parameters()
    expected = open_checkpoint(alone).feature_parameters()
    assert len(expected) == 4 and of_hosts.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(of_hosts[name], values, rtol=1e-3, atol=1e-4, err_msg=name)
