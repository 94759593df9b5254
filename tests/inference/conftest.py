"""An untrained run on the typed toy data set, as files."""

from __future__ import annotations

import pytest

from dglkge.data.dataset import Dataset
from tests.checkpoint.toy_checkpoint import save_toy_named, toy_meta, toy_tables
from tests.toy_kg import toy_dataset


@pytest.fixture(scope="module")
def dataset():
    return Dataset.open(toy_dataset(typed=True))


@pytest.fixture
def folder(tmp_path, dataset):
    """A run of random rows in two parts."""
    meta = toy_meta(
        relations=dataset.relations.relations,
        dataset_name=dataset.name,
        dataset_path=str(dataset.path),
        dataset_fingerprint=dataset.fingerprint,
        entity_types={name: dataset.num_entities(name) for name in dataset.entity_types},
    )
    tables = toy_tables(meta)
    for whole in tables.values():
        whole.rows.nan_to_num_(posinf=1.0)
    names = {name: dataset.vocabulary(name) for name in dataset.entity_types}
    save_toy_named(tmp_path / "run" / "checkpoint", meta, tables, names, 2)
    return tmp_path / "run"
