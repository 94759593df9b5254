"""PyTorch-BigGraph's models on one trainer, on two, and on two hosts: the same losses, tables and vectors."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from dglkge.checkpoint.reader import open_checkpoint
from tests.functional import job as commands
from tests.functional.simulated_hosts import train_on_hosts
from tests.functional.test_same_result_everywhere import stats, tables
from tests.toy_kg import toy_dataset

SETTINGS = (
    "model.dimension=8",
    "model.init_scale=0.3",
    "model.reciprocal_relations=false",
    "training.matmul_dtype=float32",
    "training.num_epochs=3",
    "training.batch_size=50",
    "negatives.num_uniform=20",
    "negatives.chunk_size=25",
    "sampling.order=global",
    "optimizer.lr=0.05",
    "evaluation.split=none",
)
MAX_NORM = 0.8


def global_vectors(run: Path) -> dict[str, np.ndarray]:
    """Read the vectors of the newest version, by entity type."""
    checkpoint = open_checkpoint(run)
    with h5py.File(checkpoint.path / "latest" / f"model.v{checkpoint.version}.h5") as file:
        found = file["model"].get("entities", {})
        return {name: found[name]["global_embedding"][...] for name in found}


def stored_lengths(run: Path) -> np.ndarray:
    """Return the lengths of the entities' rows as the files have them, without global vectors."""
    checkpoint = open_checkpoint(run)
    lengths = []
    for path in (checkpoint.path / "latest").glob(f"embeddings_*.v{checkpoint.version}.h5"):
        with h5py.File(path) as file:
            lengths.append(np.linalg.norm(file["embeddings"][...].astype(float), axis=1))
    return np.concatenate(lengths)


@pytest.mark.parametrize(
    "model",
    [
        # A softmax over candidates does not depend on some biases: Adagrad would turn gradients that are
        # nothing but rounding into steps.
        (
            "model.score_function=affine_cos_bias",
            "model.global_vectors=true",
            "loss.name=logistic",
            f"model.max_norm={MAX_NORM}",
        ),
        (
            "model.score_function=diagonal_l2",
            "model.global_vectors=true",
            "training.objective=one_vs_all",
            f"model.max_norm={MAX_NORM}",
        ),
    ],
    ids=["sampled", "one vs all"],
)
def test_the_same_on_any_number_of_trainers_and_hosts(tmp_path: Path, model: tuple[str, ...]) -> None:
    dataset, alone = toy_dataset(typed=True), tmp_path / "alone"
    settings = (*SETTINGS, *model)
    done = commands.train_alone(f"dataset={dataset}", f"output={alone}", *settings)
    assert done.returncode == 0, done.stderr
    two, hosts = tmp_path / "two", tmp_path / "hosts"
    done = commands.train(tmp_path, 2, f"dataset={dataset}", f"output={two}", *settings)
    assert done.returncode == 0, done.stderr
    on_two = toy_dataset(2, True, "metis")
    train_on_hosts(tmp_path / "job", on_two, 1, f"output={hosts}", *settings)
    vectors = global_vectors(alone)
    assert vectors and all(one.any() for one in vectors.values())
    for run, data in ((two, dataset), (hosts, on_two)):
        for one, several in zip(stats(alone), stats(run), strict=True):
            assert several["loss"] == pytest.approx(one["loss"], rel=1e-4)
        found = tables(data, run)
        for name, rows in tables(dataset, alone).items():
            np.testing.assert_allclose(found[name], rows, rtol=1e-3, atol=1e-3, err_msg=name)
        for name, one in global_vectors(run).items():
            np.testing.assert_allclose(one, vectors[name], rtol=1e-3, atol=1e-3)
    for run in (alone, two, hosts):
        lengths = stored_lengths(run)
        assert lengths.max() <= MAX_NORM * (1 + 1e-6) and (lengths > 0.999 * MAX_NORM).mean() > 0.1
