"""Averages of rows over epochs: what versions and rankings have, and the rows that train beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dglkge.inference.run import open_run
from tests.functional import job as commands
from tests.functional.results import datasets, metrics, tables
from tests.toy_kg import toy_dataset

SETTINGS = (
    *("model.dimension=16", "model.init_scale=0.1", "negatives.num_uniform=20", "negatives.chunk_size=25"),
    *("training.batch_size=50", "training.matmul_dtype=float32", "evaluation.valid_every_epochs=2"),
)


def settings(output: Path, *more: str) -> tuple[str, ...]:
    return (f"dataset={toy_dataset()}", f"output={output}", *SETTINGS, *more)


def trained(run: Path) -> dict[str, np.ndarray]:
    """Return the rows that train, by table and original id."""
    arrays, files = datasets(run), {"relation": "model", "entity": "embeddings_entity_0"}
    return {table: arrays[f"{file}:optimizer/trained_rows"] for table, file in files.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_has_the_weighted_mean_of_the_epochs(tmp_path: Path, dtype: str) -> None:
    """Training itself is that without averages."""
    common = (f"tables.dtype={dtype}", "training.num_epochs=4")
    plain, mean = tmp_path / "plain", tmp_path / "mean"
    commands.train_alone(*settings(plain, *common, "checkpoint.keep_every_epochs=1", "evaluation.split=none"))
    commands.train_alone(*settings(mean, *common, "training.averaging=2"))
    averages, rows = tables(mean), trained(mean)
    epochs = [tables(plain / "checkpoint" / f"epoch_{epoch}") for epoch in (1, 2, 3, 4)]
    for name, average in averages.items():
        # k(k + 1) is what the recursion gives epoch k.
        exact = sum(k * (k + 1) / 40 * epochs[k - 1][name].astype(float) for k in (1, 2, 3, 4))
        assert np.abs(average - exact).max() < 1e-6 < np.abs(average - rows[name]).max()
        assert np.array_equal(rows[name], epochs[-1][name])
    ranked = metrics(mean)["both"]["mrr"]
    from_files = [open_run(run).evaluate("test").both.mrr for run in (mean, plain)]
    assert from_files[0] == pytest.approx(ranked) != from_files[1]


def test_averages_that_begin_in_a_resume(tmp_path: Path) -> None:
    for name, more in (("plain", ()), ("mean", ("training.averaging=1",))):
        for epochs, words in ((2, ()), (3, more)):
            run = settings(tmp_path / name, *words, f"training.num_epochs={epochs}", "evaluation.split=none")
            commands.train_alone(*run, "checkpoint.keep_every_epochs=1")
    before = tables(tmp_path / "plain" / "checkpoint" / "epoch_2")
    for name, rows in tables(tmp_path / "plain").items():
        assert np.array_equal(trained(tmp_path / "mean")[name], rows)
        # The weight of epoch 3 is 2/4.
        exact = (before[name].astype(float) + rows) / 2
        assert np.abs(tables(tmp_path / "mean")[name] - exact).max() < 1e-6
