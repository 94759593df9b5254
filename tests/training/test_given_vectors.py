"""Given vectors as initial rows: names, principal axes, scale, coverage, and shards that add up to one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.config import Config, load_config
from dglkge.data.dataset import Dataset
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.embeddings.embedding_table import TableShard
from dglkge.errors import InputError
from dglkge.model.initializers import normal_rows
from dglkge.training.building import given_vectors
from dglkge.training.building.given_vectors import fill_from_vectors, principal_axes
from tests.toy_kg import toy_dataset

DIM, WIDTH = 4, 6
RANDOM = np.random.default_rng(5)
NAMES = [f"person{i}" for i in range(0, 40, 2)] + ["nobody"] + [f"town{i}" for i in range(10)]
# A large mean, and axes of very different length.
VECTORS = RANDOM.normal(size=(len(NAMES), WIDTH)) @ np.diag([9, 5, 3, 2, 0.5, 0.1]) + 100
KNOWN = [name != "nobody" for name in NAMES]


class Tables(dict):
    """Tables in this process's memory, all rows 7."""

    def __init__(self, dataset: Dataset, dim: int) -> None:
        self.entity_types = dataset.entity_types
        for name in dataset.entity_types:
            count = dataset.num_entities(name)
            # Rows of a partitioned table are in another order than ids.
            ids = torch.from_numpy(np.random.default_rng(1).permutation(count))
            rows = torch.full((count, dim), 7.0)
            shard = TableShard(0, rows, ids, ids)
            self[name] = SimpleNamespace(rows=rows, ids=ids, shard=lambda index, num, shard=shard: shard)

    def by_name(self, dataset: Dataset) -> dict[str, np.ndarray]:
        return {
            dataset.vocabulary(kind)[id_]: row
            for kind, table in self.items()
            for id_, row in zip(table.ids.tolist(), table.rows.numpy())
        }


def save(path: Path, vectors: np.ndarray = VECTORS, names: list[str] = NAMES) -> Path:
    np.save(path, vectors)
    path.with_suffix(".names.txt").write_text("".join(f"{name}\n" for name in names))
    return path


def configured(path: Path, *settings: str, dim: int = DIM) -> Config:
    sets = [f"model.dimension={dim}", "model.init_scale=0.25", f"model.init_from.path={path}", "dataset=x"]
    return load_config(None, [*sets, *settings])


def fill(path: Path, *settings: str, dim: int = DIM) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Fill toy tables; returns the rows by name, and the record."""
    dataset, records = Dataset.open(toy_dataset(typed=True)), []
    tables = Tables(dataset, dim)
    config = configured(path, *settings, dim=dim)
    fill_from_vectors(config, Cluster(World(), None), dataset, tables, records.append)  # type: ignore[arg-type]
    (record,) = records
    return tables.by_name(dataset), record


def file_rows(rows: dict[str, np.ndarray]) -> np.ndarray:
    """Return the rows of the known names, in the order of the file."""
    return np.array([rows[name] for name, is_known in zip(NAMES, KNOWN) if is_known])


def test_principal_axes_are_those_of_a_singular_value_decomposition(tmp_path, monkeypatch):
    monkeypatch.setattr("dglkge.data.vector_files.ROWS_AT_A_TIME", 7)
    rows, record = fill(save(tmp_path / "v.npy"))
    used = VECTORS[KNOWN]
    centred = used - used.mean(axis=0)
    _, sizes, axes = np.linalg.svd(centred, full_matrices=False)
    projected = centred @ axes[:DIM].T
    expected = projected * 0.25 / np.sqrt(np.mean(projected**2))
    got = file_rows(rows)
    signs = np.sign((got * expected).sum(axis=0))
    assert np.allclose(got, expected * signs, atol=1e-6)
    assert np.sqrt(np.mean(got**2)) == pytest.approx(0.25, rel=1e-5)
    assert record["variance_kept"] == pytest.approx((sizes[:DIM] ** 2).sum() / (sizes**2).sum())
    assert record["projection"] == "pca" and record["vectors"] == len(NAMES)
    missing = [name for name in rows if name not in NAMES]
    assert len(missing) == 23 and all((rows[name] == 7).all() for name in missing)
    assert record["entity_types"] == {
        "country": {"matched": 0, "missing": 3},
        "person": {"matched": 20, "missing": 20},
        "town": {"matched": 10, "missing": 0},
    }


def test_vectors_with_fewer_axes_leave_the_other_numbers_as_they_were(tmp_path: Path) -> None:
    plane = VECTORS[:, :2] @ RANDOM.normal(size=(2, WIDTH))
    got = file_rows(fill(save(tmp_path / "v.npy", plane))[0])
    assert (got[:, 2:] == 7).all() and (got[:, :2] != 7).all()
    narrow = file_rows(fill(save(tmp_path / "v.npy", VECTORS[:, :3]))[0])
    assert (narrow[:, 3] == 7).all() and (narrow[:, :3] != 7).all()


def test_a_random_projection_depends_on_the_seed_only(tmp_path: Path) -> None:
    path, random = save(tmp_path / "v.npy"), "model.init_from.projection=random"
    got = file_rows(fill(path, random, "seed=3")[0])
    matrix = normal_rows(np.arange(WIDTH), DIM, 3, given_vectors.RANDOM_TABLE, DIM**-0.5).astype(float)
    expected = VECTORS[KNOWN] @ matrix
    assert np.allclose(got, expected * 0.25 / np.sqrt(np.mean(expected**2)), rtol=1e-6)
    assert not np.allclose(got, file_rows(fill(path, random, "seed=4")[0]))
    as_given = file_rows(fill(path, random, "seed=3", "model.init_from.std=-1")[0])
    assert np.array_equal(as_given, expected.astype(np.float32))


def test_vectors_of_the_models_width_are_only_scaled(tmp_path: Path) -> None:
    path = save(tmp_path / "v.npy")
    rows, record = fill(path, "model.init_from.std=-1", dim=WIDTH)
    assert np.array_equal(file_rows(rows), VECTORS[KNOWN].astype(np.float32))
    assert (record["projection"], record["factor"]) == ("none", 1.0)
    scaled = file_rows(fill(path, "model.init_from.std=2", dim=WIDTH)[0])
    assert np.sqrt(np.mean(scaled**2)) == pytest.approx(2, rel=1e-6)
    short = file_rows(fill(path, "model.init_from.std=2", "model.max_norm=1", dim=WIDTH)[0])
    assert np.linalg.norm(short, axis=1) == pytest.approx(np.ones(30), rel=1e-5)


def test_entities_whose_names_a_text_makes_equal_share_a_vector() -> None:
    matches = given_vectors.Matches(["a_b", "c", "a_b"])
    file: Any = SimpleNamespace(place=lambda number: f"f:{number}")
    matches.add(5, "a_b", file)
    matches.add(6, "d", file)
    assert [part.tolist() for part in matches.matched()] == [[5, 5], [0, 2]]
    with pytest.raises(InputError, match="f:9: the name 'a_b' stands at f:5 already; allowed is once"):
        matches.add(9, "a_b", file)


def test_axes_do_not_depend_on_blocks() -> None:
    whole = principal_axes([VECTORS], 3)
    parts = principal_axes(np.array_split(VECTORS, 4), 3)
    assert all(np.allclose(part, other, rtol=1e-9) for part, other in zip(whole, parts))


@pytest.mark.parametrize(
    "vectors, names, message",
    [
        (VECTORS, [f"x{i}" for i in range(len(NAMES))], "v.npy: no name is an entity's of type country or "
         "person or town: the file begins with 'x0', the data set with 'country0'"),
        (np.full_like(VECTORS, 3), NAMES, "v.npy: the vectors of the entities are all equal or 0"),
        (np.where(np.arange(len(NAMES)) == 2, np.nan, VECTORS.T).T, NAMES, "v.names.txt:3: the vector has "
         "nan; allowed: finite"),
        (VECTORS, [*NAMES[:-1], "town3"], "v.names.txt:31: the name 'town3' stands at .*:25 already"),
    ],
)  # fmt: skip
def test_wrong_vectors(tmp_path: Path, vectors: np.ndarray, names: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fill(save(tmp_path / "v.npy", vectors, names))
