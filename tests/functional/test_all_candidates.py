"""Training against all entities or relations: the same on one, two and three trainers, and on two hosts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.functional import job as commands
from tests.functional.simulated_hosts import train_on_hosts
from tests.functional.test_same_result_everywhere import stats, tables
from tests.toy_kg import toy_dataset

ONE_VS_ALL = "training.objective={name: one_vs_all, label_smoothing: 0.1}"
K_VS_ALL = "training.objective={name: k_vs_all, label_smoothing: 0.1}"
SETTINGS = (
    "model.dimension=16",
    "model.init_scale=0.1",
    "training.matmul_dtype=float32",
    "training.num_epochs=3",
    "training.batch_size=50",
    "sampling.order=global",
    "regularizer.name=n3",
    "regularizer.weight=0.01",
    "evaluation.split=none",
)


def assert_same(dataset: Path, alone: Path, other_dataset: Path, run: Path) -> None:
    """Compare losses and tables of two runs."""
    for one, several in zip(stats(alone), stats(run), strict=True):
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-4)
    found = tables(other_dataset, run)
    for name, rows in tables(dataset, alone).items():
        np.testing.assert_allclose(found[name], rows, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("typed", "objective"),
    [
        (
            False,
            (ONE_VS_ALL, "training.relation_prediction=2"),
        ),
        (
            True,
            (ONE_VS_ALL, "training.relation_prediction=2"),
        ),
        (True, (K_VS_ALL, "loss.name=logistic")),
        (True, ("training.objective=k_vs_all", "loss={name: margin_ranking, adversarial_weights: true}")),
        (
            True,
            (
                *("training.relation_prediction=2", "regularizer.name=ivr"),
                *("negatives.num_uniform=20", "negatives.chunk_size=25", "model.entity_dropout=0.2"),
            ),
        ),
        (
            False,
            (
                *(
                    K_VS_ALL,
                    "regularizer.name=dura",
                    "training.relation_prediction=2",
                ),
                *("model.entity_dropout=0.2", "model.relation_dropout=0.1"),
            ),
        ),
    ],
    ids=[
        *("one vs all, one type", "one vs all, three types", "k vs all, three types", "k vs all with pairs"),
        *("relations beside samples", "k vs all with dura and dropout"),
    ],
)
def test_losses_and_tables_do_not_depend_on_trainers_and_hosts(
    tmp_path: Path, typed: bool, objective: tuple[str, ...]
) -> None:
    dataset, alone = toy_dataset(typed=typed), tmp_path / "alone"
    settings = (*SETTINGS, *objective)
    done = commands.train_alone(f"dataset={dataset}", f"output={alone}", *settings)
    assert done.returncode == 0, done.stderr
    assert all(record["bytes_sent"] == 0 for record in stats(alone))
    # Two trainers of one machine in one case: what three agree on is divided in no other way.
    for trainers in (2, 3) if not typed and ONE_VS_ALL in objective else (3,):
        run = tmp_path / f"run{trainers}"
        done = commands.train(tmp_path, trainers, f"dataset={dataset}", f"output={run}", *settings)
        assert done.returncode == 0, done.stderr
        assert_same(dataset, alone, dataset, run)
        assert all(record["bytes_sent"] == 0 for record in stats(run))
    on_two, run = toy_dataset(2, typed, "metis" if typed else "random"), tmp_path / "hosts"
    train_on_hosts(tmp_path / "job", on_two, 2 - typed, f"output={run}", *settings)
    assert_same(dataset, alone, on_two, run)
    assert all(record["bytes_sent"] > 0 for record in stats(run))
