"""An untrained run on the typed toy data set, as files."""

from __future__ import annotations

import pytest

import dglkge
from dglkge.data.dataset import Dataset
from tests.checkpoint.toy_checkpoint import save_toy_run
from tests.toy_kg import toy_dataset


@pytest.fixture(scope="module")
def dataset():
    return Dataset.open(toy_dataset(typed=True))


@pytest.fixture
def folder(tmp_path, dataset):
    return save_toy_run(tmp_path / "run", dataset)


@pytest.fixture
def run(folder):
    return dglkge.open_run(folder)
