"""One toy dataset, and an untrained run on it, for the tests of all commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dglkge.data.dataset import Dataset
from tests.checkpoint.toy_checkpoint import save_toy_run
from tests.toy_kg import toy_dataset


@pytest.fixture(scope="session")
def dataset() -> Dataset:
    return Dataset.open(toy_dataset(typed=True))


@pytest.fixture
def run(tmp_path, dataset) -> Path:
    return save_toy_run(tmp_path / "run", dataset)


@pytest.fixture
def shown(call):
    def run_main(*arguments):
        status, out, err = call(*arguments)
        assert status == 0, err
        return out

    return run_main


@pytest.fixture
def report(shown):
    return lambda *arguments: json.loads(shown(*arguments, "--json"))


@pytest.fixture
def refusal(call):
    """Run a command that is refused with status 2, and return its one line on stderr."""

    def run_main(*arguments):
        status, out, err = call(*arguments)
        assert (status, out) == (2, "") and err.startswith("dglkge: error: ") and err.count("\n") == 1, err
        return err.removeprefix("dglkge: error: ").rstrip("\n")

    return run_main
