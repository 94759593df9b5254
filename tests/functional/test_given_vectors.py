"""Given vectors in whole jobs: the same rows for any trainers, frozen ones stay, a resume reads no file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from dglkge.data.dataset import Dataset
from tests.functional import job as commands
from tests.functional.results import tables
from tests.toy_kg import toy_dataset

DIM = 8
SETTINGS = (
    *(f"model.dimension={DIM}", "model.init_scale=0.1", "training.num_epochs=1", "training.batch_size=100"),
    *("negatives.num_uniform=20", "negatives.chunk_size=50", "evaluation.split=none"),
)


def write_vectors(path: Path, dataset: Path) -> dict[str, np.ndarray]:
    """Write vectors of every second entity as text; returns them by type, as rows of the model's scale."""
    data, random, vectors = Dataset.open(dataset), np.random.default_rng(2), {}
    with path.open("w") as file:
        for kind in data.entity_types:
            names = list(data.vocabulary(kind).names)[::2]
            vectors[kind] = random.normal(size=(len(names), DIM))
            for name, row in zip(names, vectors[kind].tolist()):
                file.write(" ".join([name, *map(repr, row)]) + "\n")
    scale = 0.1 / np.sqrt(np.mean(np.concatenate(list(vectors.values())) ** 2))
    return {kind: rows * scale for kind, rows in vectors.items()}


def test_frozen_rows_are_the_vectors_on_one_and_two_trainers_and_move_after_a_resume(tmp_path: Path) -> None:
    dataset, path = toy_dataset(typed=True), tmp_path / "vectors.vec"
    expected = write_vectors(path, dataset)
    settings = (f"dataset={dataset}", *SETTINGS, f"model.init_from.path={path}")
    alone, launched, frozen = tmp_path / "alone", tmp_path / "launched", "model.init_from.frozen=true"
    done = commands.train_alone(f"output={alone}", *settings, frozen)
    assert f"vectors of {path}: person: 20 entities matched, 20 missing" in done.stderr
    assert "person: 20 rows without a vector stay random: model.init_from.frozen is true" in done.stderr
    commands.train(tmp_path, 2, f"output={launched}", *settings, frozen, "training.objective=one_vs_all")
    by_one, by_two = tables(alone), tables(launched)
    for kind, rows in expected.items():
        assert np.array_equal(by_one[kind], by_two[kind])
        np.testing.assert_allclose(by_one[kind][::2], rows, atol=1e-6)
    assert not np.array_equal(by_one["relation"], by_two["relation"])
    record = json.loads((launched / "init_from.json").read_text())
    assert record == json.loads((alone / "init_from.json").read_text())
    assert record["entity_types"]["person"] == {"matched": 20, "missing": 20} and record["frozen"] is True

    path.unlink()
    commands.train_alone(
        f"output={alone}", *settings, "training.num_epochs=2", "model.init_from.frozen=false"
    )
    assert 0 < np.abs(tables(alone)["person"] - by_one["person"]).max() < 1
    done = commands.train_alone(f"output={tmp_path / 'new'}", *settings, status=2)
    assert f"error: cannot read {path}: there is no such file" in done.stderr
    assert "Traceback" not in done.stderr
