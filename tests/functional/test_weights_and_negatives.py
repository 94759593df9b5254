"""Weights, confidences and negatives by side, degree and mask: the same for any trainers and hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional import job as commands
from tests.functional.simulated_hosts import train_on_hosts
from tests.functional.test_all_candidates import assert_same
from tests.functional.test_same_result_everywhere import stats
from tests.toy_kg import toy_dataset, weighted_dataset

SETTINGS = (
    "model.dimension=16",
    "model.init_scale=0.1",
    "training.matmul_dtype=float32",
    "training.num_epochs=3",
    "training.batch_size=50",
    "negatives.num_uniform=20",
    "negatives.chunk_size=25",
    "sampling.order=global",
    "negatives.mask_known=true",
    "negatives.degree_power=0.75",
    "regularizer.name=n3",
    "regularizer.weight=0.01",
    "evaluation.split=none",
)
WEIGHTED = (
    "loss.name=bce",
    "loss.confidences=true",
    "loss.adversarial_weights=true",
    "loss.relation_weights={near: 0.5, knows: 3}",
    "negatives.num_for_heads=7",
)


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted, autograd", "tails only, compiled"])
def test_losses_and_tables_do_not_depend_on_trainers_and_hosts(tmp_path: Path, weighted: bool) -> None:
    if weighted:
        dataset, on_two = (weighted_dataset(tmp_path / f"data{num}", num_parts=num) for num in (1, 2))
        settings = (*SETTINGS, *WEIGHTED)
    else:
        dataset, on_two = toy_dataset(typed=True), toy_dataset(2, True, "metis")
        settings = (*SETTINGS, "negatives.num_for_heads=0")
    alone = tmp_path / "alone"
    done = commands.train_alone(f"dataset={dataset}", f"output={alone}", *settings)
    assert done.returncode == 0, done.stderr
    for trainers in (2, 3) if weighted else (3,):
        run = tmp_path / f"run{trainers}"
        done = commands.train(tmp_path, trainers, f"dataset={dataset}", f"output={run}", *settings)
        assert done.returncode == 0, done.stderr
        assert_same(dataset, alone, dataset, run)
    run = tmp_path / "hosts"
    train_on_hosts(tmp_path / "job", on_two, 1, f"output={run}", *settings)
    assert_same(dataset, alone, on_two, run)
    assert all(record["bytes_sent"] > 0 for record in stats(run))
