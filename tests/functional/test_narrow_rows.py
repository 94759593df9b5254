"""Rows of entities in 16 bits, and averages of rows over epochs: they learn, and resume bit by bit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from dglkge.inference.run import open_run
from tests.functional import job as commands
from tests.functional.results import assert_near, datasets, losses, metrics, progress, tables
from tests.functional.simulated_hosts import CHECKED_TRAIN, train_on_hosts
from tests.toy_kg import toy_dataset

SETTINGS = (
    *("model.dimension=16", "model.init_scale=0.1", "negatives.num_uniform=20", "negatives.chunk_size=25"),
    *("training.batch_size=50", "training.matmul_dtype=float32", "tables.dtype=bfloat16"),
)


def settings(output: Path, *more: str) -> tuple[str, ...]:
    return (f"dataset={toy_dataset()}", f"output={output}", *SETTINGS, *more)


def trained(run: Path) -> dict[str, np.ndarray]:
    """Return the rows that train beside their averages, by table and original id."""
    arrays, files = datasets(run), {"relation": "model", "entity": "embeddings_entity_0"}
    return {table: arrays[f"{file}:optimizer/trained_rows"] for table, file in files.items()}


def fits(values: np.ndarray) -> bool:
    """Return whether every number has 16 bits."""
    rows = torch.from_numpy(values)
    return torch.equal(rows, rows.to(torch.bfloat16).float())


def assert_rounded(run: Path, expected: Path) -> None:
    """Hold two runs equal but for sums in another order, which may turn the rounding of a few numbers.

    Such a number is off by a unit in the last place, 2**-7 of it, and what is trained after it by as little.
    """
    rows, others = tables(run), tables(expected)
    assert (rows["entity"] == others["entity"]).mean() > 0.9
    assert_near(rows, others, 0.02, 0.002)


def test_a_killed_job_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """With averages of the rows that train, which versions have and validation ranks."""
    more = ("training.averaging=4", "evaluation.valid_every_epochs=2")
    printed = commands.kill_and_resume(tmp_path, settings, *more)
    assert ["resumed: " in text for text in printed] == [True, False]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert_near(datasets(killed), datasets(whole), 0, 0)
    assert metrics(killed, "valid")["both"]["mrr"] == metrics(whole, "valid")["both"]["mrr"]
    rows, reported = trained(whole), losses(whole)
    assert fits(rows["entity"]) and not fits(rows["relation"])
    assert reported[-1] < reported[0]
    # The live tables were ranked, and these are the files.
    done = commands.dglkge("evaluate", str(whole), "--json")
    assert json.loads(done.stdout)["both"]["mrr"] == pytest.approx(metrics(whole)["both"]["mrr"])
    # The random bits do not depend on the number of trainers.
    until = f"training.num_epochs={progress(whole)[0]}"
    commands.train_alone(*settings(tmp_path / "alone", *more, until))
    assert_rounded(tmp_path / "alone", whole)


def test_two_hosts_send_rows_as_they_are_stored(tmp_path: Path) -> None:
    """The script compares every row that the exchange brings with DGL's kvstore, also in 16 bits."""
    more = (*SETTINGS, "training.num_epochs=3", "evaluation.split=test", "sampling.order=global")
    hosts, alone = tmp_path / "hosts", tmp_path / "alone"
    words = (f"output={hosts}", *more)
    logs = train_on_hosts(tmp_path / "job", toy_dataset(2), 1, *words, script=CHECKED_TRAIN)
    assert all(re.search(r"compared \d{3,} rows", log) for log in logs), logs
    commands.train_alone(f"dataset={toy_dataset()}", f"output={alone}", *more)
    assert fits(tables(hosts)["entity"]) and fits(tables(alone)["entity"])
    assert_rounded(alone, hosts)
    assert losses(hosts) == pytest.approx(losses(alone), rel=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_has_the_weighted_mean_of_the_epochs(tmp_path: Path, dtype: str) -> None:
    """Training itself is that without averages."""
    common = (f"tables.dtype={dtype}", "training.num_epochs=4", "evaluation.valid_every_epochs=2")
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
    plain, mean = tmp_path / "plain", tmp_path / "mean"
    for run, more in ((plain, ()), (mean, ("training.averaging=1",))):
        for epochs, words in ((2, ()), (3, more)):
            common = ("tables.dtype=float32", "evaluation.split=none", "checkpoint.keep_every_epochs=1")
            commands.train_alone(*settings(run, *words, *common, f"training.num_epochs={epochs}"))
    before = tables(plain / "checkpoint" / "epoch_2")
    for name, rows in tables(plain).items():
        assert np.array_equal(trained(mean)[name], rows)
        # The weight of epoch 3 is 2/4.
        exact = (before[name].astype(float) + rows) / 2
        assert np.abs(tables(mean)[name] - exact).max() < 1e-6
