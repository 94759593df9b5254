"""What a run has left: rows, losses, metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from dglkge.checkpoint.reader import open_checkpoint
from tests.checkpoint.toy_checkpoint import datasets_in


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def stats(run: Path) -> list[dict[str, Any]]:
    """Read what a run reported, but for the records of buckets."""
    return [line for line in json_lines(run / "stats.jsonl") if "bucket_record" not in line]


def losses(run: Path) -> list[float]:
    """Return the losses that a run reported."""
    return [record["loss"] for record in stats(run) if "loss" in record]


def records(run: Path) -> list[dict[str, Any]]:
    """Read the lines of the newest version's training_stats.json."""
    return json_lines(run / "checkpoint" / "latest" / "training_stats.json")


def metrics(run: Path, split: str = "test") -> dict[str, dict[str, float]]:
    """Read the metrics of the live tables, which the job ranked at its end, by side."""
    sides: dict[str, dict[str, float]] = json.loads((run / "metrics.json").read_text(encoding="utf-8"))[split]
    return sides


def progress(run: Path) -> tuple[int, int]:
    """Return the epochs and batches of the newest version."""
    fields = open_checkpoint(run).meta.progress
    return fields["finished_epochs"], fields["batches_done"]


def tables(run: Path) -> dict[str, np.ndarray]:
    """Return all rows of a run's newest version, by table and original id."""
    checkpoint = open_checkpoint(run)
    sizes = {**checkpoint.meta.entity_types, "relation": len(checkpoint.meta.relations)}
    return {name: checkpoint[name].gather(torch.arange(size)).numpy() for name, size in sizes.items()}


def datasets(run: Path) -> dict[str, np.ndarray]:
    """Return all datasets of the newest version's files but PyTorch-BigGraph's blobs: ``model:dense/...``."""
    arrays: dict[str, np.ndarray] = {}
    for path in sorted((run / "checkpoint" / "latest").glob("*.h5")):
        with h5py.File(path) as file:
            for name, item in datasets_in(file).items():
                if item.dtype.kind != "V":
                    arrays[f"{path.name.split('.')[0]}:{name}"] = item[()]
    return arrays


def parameters(run: Path) -> dict[str, np.ndarray]:
    """Return all that a run has trained: rows, modules, projections of features, global vectors."""
    checkpoint = open_checkpoint(run)
    vectors = {f"vector of {kind}": checkpoint.global_vector(kind) for kind in checkpoint.meta.entity_types}
    modules = {**checkpoint.dense_parameters(), **checkpoint.feature_parameters()}
    arrays = {name: values for name, values in {**modules, **vectors}.items() if values is not None}
    return {**tables(run), **{name: np.asarray(values) for name, values in arrays.items()}}


def assert_near(actual: dict[str, Any], expected: dict[str, Any], rtol: float, atol: float) -> None:
    """Hold arrays equal, by name, but for sums in another order."""
    assert actual.keys() == expected.keys()
    for name, numbers in expected.items():
        np.testing.assert_allclose(actual[name], numbers, rtol, atol, err_msg=name)


def assert_same_training(run: Path, expected: Path, rtol: float = 1e-3, atol: float = 1e-4) -> None:
    """Hold losses and parameters of a run equal to those of another, but for sums in another order."""
    for record, other in zip(stats(run), stats(expected), strict=True):
        assert record.get("loss", 0.0) == pytest.approx(other.get("loss", 0.0), rel=1e-4)
    assert_near(parameters(run), parameters(expected), rtol, atol)
