"""Given vectors as initial rows: names, principal axes, scale, coverage, and shards that add up to one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.model.initializers import normal_rows
from dglkge.training.building import given_vectors
from dglkge.typing import RELATION
from tests.toy_kg import toy_dataset
from tests.training.live import dense_rows, opened, settings

DIM, WIDTH = 4, 6
RANDOM = np.random.default_rng(5)
NAMES = [f"person{i}" for i in range(0, 40, 2)] + ["nobody"] + [f"town{i}" for i in range(10)]
# A large mean, and axes of very different length.
VECTORS = RANDOM.normal(size=(len(NAMES), WIDTH)) @ np.diag([9, 5, 3, 2, 0.5, 0.1]) + 100
KNOWN = [name != "nobody" for name in NAMES]


def save(folder: Path, vectors: np.ndarray = VECTORS, names: list[str] = NAMES) -> str:
    """Write vectors and names; return the setting that names them."""
    np.save(folder / "v.npy", vectors)
    (folder / "v.names.txt").write_text("".join(f"{name}\n" for name in names))
    return f"model.init_from.path={folder / 'v.npy'}"


def started(run: Path, *more: str, dim: int = DIM) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Start a run; return the rows of the names of the file in its order, and all rows by name."""
    data = Dataset.open(toy_dataset(typed=True))
    sets = (f"model.dimension={dim}", "model.init_scale=0.25", *more)
    with opened(load_config(None, settings(data.path, run, *sets))) as trainer:
        rows = {
            name: row
            for kind, table in dense_rows(trainer).items() if kind != RELATION
            for name, row in zip(data.vocabulary(kind).names, table.detach().numpy())
        }  # fmt: skip
    return np.array([rows[name] for name in NAMES if name in rows]), rows


def scaled(rows: np.ndarray, std: float) -> np.ndarray:
    return rows * std / np.sqrt(np.mean(rows**2))


def test_principal_axes_are_those_of_a_singular_value_decomposition(tmp_path, monkeypatch):
    monkeypatch.setattr("dglkge.data.vector_files.ROWS_AT_A_TIME", 7)
    run = tmp_path / "run"
    got, rows = started(run, save(tmp_path))
    record, (_, untouched) = json.loads((run / "init_from.json").read_text()), started(tmp_path / "untouched")
    used = VECTORS[KNOWN]
    centred = used - used.mean(axis=0)
    _, sizes, axes = np.linalg.svd(centred, full_matrices=False)
    expected = scaled(centred @ axes[:DIM].T, 0.25)
    signs = np.sign((got * expected).sum(axis=0))
    assert np.allclose(got, expected * signs, atol=1e-6)
    assert record["variance_kept"] == pytest.approx((sizes[:DIM] ** 2).sum() / (sizes**2).sum())
    assert record["projection"] == "pca" and record["vectors"] == len(NAMES)
    missing = [name for name in rows if name not in NAMES]
    assert len(missing) == 23 and all((rows[name] == untouched[name]).all() for name in missing)
    assert record["entity_types"] == {
        "country": {"matched": 0, "missing": 3},
        "person": {"matched": 20, "missing": 20},
        "town": {"matched": 10, "missing": 0},
    }


def test_vectors_with_fewer_axes_leave_the_other_numbers_as_they_were(tmp_path: Path) -> None:
    plane = VECTORS[:, :2] @ RANDOM.normal(size=(2, WIDTH))
    untouched, _ = started(tmp_path / "untouched")
    for vectors, num in ((plane, 2), (VECTORS[:, :3], 3)):
        got, _ = started(tmp_path / f"{num}", save(tmp_path, vectors))
        assert (got[:, num:] == untouched[:, num:]).all() and (got[:, :num] != untouched[:, :num]).all()


def test_a_random_projection_depends_on_the_seed_only(tmp_path: Path) -> None:
    projected = (save(tmp_path), "model.init_from.projection=random")
    got, _ = started(tmp_path / "3", *projected, "seed=3")
    matrix = normal_rows(np.arange(WIDTH), DIM, 3, given_vectors.RANDOM_TABLE, DIM**-0.5).astype(float)
    expected = VECTORS[KNOWN] @ matrix
    assert np.allclose(got, scaled(expected, 0.25), rtol=1e-6)
    assert not np.allclose(got, started(tmp_path / "4", *projected, "seed=4")[0])
    as_given, _ = started(tmp_path / "as_given", *projected, "seed=3", "model.init_from.std=-1")
    assert np.array_equal(as_given, expected.astype(np.float32))


def test_vectors_of_the_models_width_are_only_scaled(tmp_path: Path) -> None:
    as_given, scale = (save(tmp_path), "model.init_from.std=-1"), (save(tmp_path), "model.init_from.std=2")
    got, _ = started(tmp_path / "as_given", *as_given, dim=WIDTH)
    assert np.array_equal(got, VECTORS[KNOWN].astype(np.float32))
    record = json.loads((tmp_path / "as_given" / "init_from.json").read_text())
    assert (record["projection"], record["factor"]) == ("none", 1.0)
    got, _ = started(tmp_path / "scaled", *scale, dim=WIDTH)
    np.testing.assert_allclose(got, scaled(VECTORS[KNOWN], 2), rtol=1e-6)
    short, _ = started(tmp_path / "short", *scale, "model.max_norm=1", dim=WIDTH)
    assert np.linalg.norm(short, axis=1) == pytest.approx(np.ones(30), rel=1e-5)


def test_entities_whose_names_a_text_makes_equal_share_a_vector() -> None:
    names = {"one": ["a_b", "c", "a b"], "other": ["e", "a b"]}
    dataset: Any = SimpleNamespace(names_of=lambda name, ids: names[name])
    file: Any = SimpleNamespace(
        path=Path("f"), key=lambda name: name.replace(" ", "_"), names=lambda: "d a_b".split()
    )
    count, matches = given_vectors.match_names(file, dataset, dict.fromkeys(names, np.zeros(0, np.int64)))
    found = {name: [part.tolist() for part in matched] for name, matched in matches.items()}
    assert count == 2 and found == {"one": [[1, 1], [0, 2]], "other": [[1], [1]]}


@pytest.mark.parametrize("vectors, names, message", [
    (VECTORS, [f"x{i}" for i in range(len(NAMES))], "v.npy: no name is an entity's of type country or "
     "person or town: the file begins with 'x0', the data set with 'country0'"),
    (np.full_like(VECTORS, 3), NAMES, "v.npy: the vectors of the entities are all equal or 0"),
    (np.where(np.arange(len(NAMES)) == 2, np.nan, VECTORS.T).T, NAMES, "v.names.txt:3: the vector has "
     "nan; allowed: finite"),
    (VECTORS, [*NAMES[:-1], "town3"], "v.names.txt:31: the name 'town3' stands at .*:25 already"),
])  # fmt: skip
def test_wrong_vectors(tmp_path: Path, vectors: np.ndarray, names: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        started(tmp_path / "run", save(tmp_path, vectors, names))
