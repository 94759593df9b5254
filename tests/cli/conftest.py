"""One toy dataset, and an untrained run on it, for the tests of all commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from dglkge.cli.main import main
from dglkge.data.dataset import Dataset
from tests.checkpoint.toy_checkpoint import save_toy_named, toy_meta, toy_tables
from tests.toy_kg import toy_dataset


@pytest.fixture(scope="session")
def dataset() -> Dataset:
    """People, towns and countries, in one partition."""
    return Dataset.open(toy_dataset(typed=True))


@pytest.fixture
def run(tmp_path, dataset) -> Path:
    """A run of random rows in two parts, which knows where its dataset lies."""
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


@pytest.fixture
def call(capsys):
    """Run a command and return its status, stdout and stderr."""

    def run_main(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_main
