"""The same training on one, two and four hosts: the same losses, tables and ranks but for float32 sums."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.training import products
from tests.functional import job as commands
from tests.functional.simulated_hosts import CHECKED_TRAIN, train_on_hosts
from tests.toy_kg import toy_dataset

SETTINGS = (
    "model.dimension=16",
    "model.init_scale=0.1",
    "training.num_epochs=4",
    "training.batch_size=50",
    "negatives.num_uniform=20",
    "negatives.chunk_size=25",
    "regularizer.name=n3",
    "regularizer.weight=0.01",
    "optimizer.lr=0.05",
)


LARGE_ENOUGH = (
    "model.dimension=64",
    "model.init_scale=0.1",
    "training.num_epochs=3",
    "training.batch_size=150",
    "negatives.num_uniform=300",
    "negatives.chunk_size=150",
    "optimizer.lr=0.05",
)
"""A size at which products may be taken in bfloat16."""


def stats(run: Path) -> list[dict[str, Any]]:
    """Read what a run reported."""
    return [json.loads(line) for line in (run / "stats.jsonl").read_text(encoding="utf-8").splitlines()]


def tables(dataset: Path, run: Path) -> dict[str, np.ndarray]:
    """Read all rows of a run, by original id."""
    data, checkpoint = Dataset.open(dataset), open_checkpoint(run)
    sizes = {name: data.num_entities(name) for name in data.entity_types}
    sizes["relation"] = data.num_relations
    return {name: checkpoint.gather(name, torch.arange(size)).numpy() for name, size in sizes.items()}


def train_on_one(typed: bool, run: Path) -> Path:
    """Train in one process on one partition."""
    done = commands.train_alone(f"dataset={toy_dataset(typed=typed)}", f"output={run}", *SETTINGS)
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.parametrize(
    "num_hosts, typed, method, trainers_per_host", [(2, True, "metis", 2), (4, False, "random", 1)]
)
def test_losses_tables_and_ranks_do_not_depend_on_the_hosts(
    tmp_path: Path, num_hosts: int, typed: bool, method: str, trainers_per_host: int
) -> None:
    alone, run = train_on_one(typed, tmp_path / "alone"), tmp_path / "run"
    dataset = toy_dataset(num_hosts, typed, method)
    settings = (f"output={run}", *SETTINGS)
    logs = train_on_hosts(tmp_path / "job", dataset, trainers_per_host, *settings, script=CHECKED_TRAIN)
    assert len(logs) == num_hosts * trainers_per_host
    assert all(re.search(r"compared \d{3,} rows", log) for log in logs), logs
    expected, got = stats(alone), stats(run)
    for one, several in zip(expected, got, strict=True):
        assert [one[key] for key in ("epoch", "batches_done")] == [several["epoch"], several["batches_done"]]
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert all(record["bytes_sent"] == 0 for record in expected)
    assert all(record["bytes_sent"] > 0 for record in got)
    theirs = tables(dataset, run)
    for name, rows in tables(toy_dataset(typed=typed), alone).items():
        np.testing.assert_allclose(theirs[name], rows, rtol=1e-3, atol=1e-4, err_msg=name)
    metrics = [json.loads((path / "metrics.json").read_text())["test"]["both"] for path in (alone, run)]
    assert metrics[1]["mrr"] == pytest.approx(metrics[0]["mrr"], abs=0.02)


def test_float32_products_are_the_exact_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One setting gives the same tables with one process and with two trainers, at a size where the default
    would choose bfloat16, with which they differ by about 6e-4: ten times this tolerance."""
    monkeypatch.setattr(products, "product_seconds", lambda left, right: float(left.element_size()))
    assert products.faster_type((300, 300, 64)) == "bfloat16"
    exact = ("training.products=float32", f"dataset={toy_dataset()}", *LARGE_ENOUGH)
    runs = [tmp_path / name for name in ("alone", "two")]
    for done in (
        commands.train_alone(*exact, f"output={runs[0]}"),
        commands.train(tmp_path, 2, *exact, f"output={runs[1]}"),
    ):
        assert done.returncode == 0, done.stderr
    one, two = ([record["loss"] for record in stats(run)] for run in runs)
    assert two == pytest.approx(one, rel=1e-5)
    theirs = tables(toy_dataset(), runs[1])
    for name, rows in tables(toy_dataset(), runs[0]).items():
        np.testing.assert_allclose(theirs[name], rows, rtol=0, atol=5e-5, err_msg=name)
