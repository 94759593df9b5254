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
    "sampling.order=global",
    "regularizer.name=n3",
    "regularizer.weight=0.01",
    "optimizer.lr=0.05",
)


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
