"""Given vectors in whole jobs: the same rows for any trainers, frozen ones stay, a resume reads no file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from dglkge.data.dataset import Dataset
from tests.functional import job as commands
from tests.functional.results import tables
from tests.toy_kg import toy_dataset

WIDTH, DIM = 12, 8
SETTINGS = (
    f"model.dimension={DIM}",
    "model.init_scale=0.1",
    "training.num_epochs=1",
    "training.batch_size=100",
    "negatives.num_uniform=20",
    "negatives.chunk_size=50",
    "evaluation.split=none",
)


def write_vectors(folder: Path, dataset: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Write vectors of half of the entities as text; returns the rows of each table, NaN where missing."""
    data, random = Dataset.open(dataset), np.random.default_rng(2)
    names = [(kind, id_) for kind in data.entity_types for id_ in range(0, data.num_entities(kind), 2)]
    vectors = random.normal(size=(len(names), WIDTH)) * np.arange(1, WIDTH + 1)
    path = folder / "vectors.vec"
    lines = [
        " ".join([data.vocabulary(kind)[id_], *map(repr, row)])
        for (kind, id_), row in zip(names, vectors.tolist())
    ]
    path.write_text("\n".join(lines) + "\n")
    _, _, axes = np.linalg.svd(vectors - vectors.mean(axis=0))
    rows = (vectors - vectors.mean(axis=0)) @ axes[:DIM].T
    rows *= 0.1 / np.sqrt(np.mean(rows**2))
    expected = {kind: np.full((data.num_entities(kind), DIM), np.nan) for kind in data.entity_types}
    for (kind, id_), row in zip(names, rows):
        expected[kind][id_] = row
    return path, expected


def test_frozen_rows_are_the_vectors_on_one_and_two_trainers_and_move_after_a_resume(tmp_path: Path) -> None:
    dataset = toy_dataset(typed=True)
    path, expected = write_vectors(tmp_path, dataset)
    settings = (f"dataset={dataset}", *SETTINGS, f"model.init_from.path={path}")
    alone, launched = tmp_path / "alone", tmp_path / "launched"
    done = commands.train_alone(f"output={alone}", *settings, "model.init_from.frozen=true")
    assert f"vectors of {path}: person: 20 entities matched, 20 missing" in done.stderr
    assert "person: 20 rows without a vector stay random: model.init_from.frozen is true" in done.stderr
    objective = ("training.objective=one_vs_all", "model.init_from.frozen=true")
    done = commands.train(tmp_path, 2, f"output={launched}", *settings, *objective)
    by_one, by_two = tables(alone), tables(launched)
    for kind, rows in expected.items():
        assert np.array_equal(by_one[kind], by_two[kind])
        has_vector = ~np.isnan(rows[:, 0])
        signs = np.sign((by_one[kind][has_vector] * rows[has_vector]).sum(axis=0))
        np.testing.assert_allclose(by_one[kind][has_vector], rows[has_vector] * signs, atol=1e-6)
    assert not np.array_equal(by_one["relation"], by_two["relation"])
    record = json.loads((launched / "init_from.json").read_text())
    assert record == json.loads((alone / "init_from.json").read_text())
    assert record["entity_types"]["person"] == {"matched": 20, "missing": 20} and record["frozen"] is True

    path.unlink()
    more = ("training.num_epochs=2", "model.init_from.frozen=false")
    done = commands.train_alone(f"output={alone}", *settings, *more)
    after = tables(alone)
    assert 0 < np.abs(after["person"] - by_one["person"]).max() < 1
    done = commands.train_alone(f"output={tmp_path / 'new'}", *settings, status=2)
    assert f"error: cannot read {path}: there is no such file" in done.stderr
    assert "Traceback" not in done.stderr
