"""The synthetic graph: skewed as said, complete, the same every time, and readable by the partition tool."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import synthetic_graph as synthetic
from dglkge.data.dataset import Dataset
from dglkge.partition.make_dataset import Options, partition_triples
from tests.toy_kg import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "synthetic_graph.py"


@pytest.mark.parametrize("exponent", [0.0, 0.75, 1.0, 1.5])
def test_ranks_follow_the_power_law(exponent):
    """Against the integral of the density between two ranks, computed by summing a fine grid."""
    num, size = 50, 200_000
    ranks = synthetic.zipf_ranks((np.arange(size) + 0.5) / size, num, exponent)
    assert ranks.min() == 0 and ranks.max() == num - 1
    grid = np.arange(1, num + 1, 1e-4)
    density = grid**-exponent
    expected = np.add.reduceat(density, np.searchsorted(grid, np.arange(1, num + 1) - 1e-9)) / density.sum()
    assert np.allclose(np.bincount(ranks, minlength=num) / size, expected, atol=1e-4)


def test_scatter_is_one_to_one_and_takes_neighbours_apart():
    for num in (1, 2, 7, 1000, 1024, 99_991):
        mapped = synthetic.scatter(np.arange(num), num, offset=3)
        assert np.array_equal(np.sort(mapped), np.arange(num))
        assert num < 1000 or np.abs(np.diff(mapped)).min() > 100


def test_every_entity_occurs_and_degrees_are_skewed():
    shape = synthetic.Shape(2000, 20, 6000, seed=1)
    heads, relations, tails = synthetic.edges(shape, 0, 6000)
    degrees = np.bincount(heads, minlength=2000) + np.bincount(tails, minlength=2000)
    assert degrees.min() >= 1 and len(degrees) == 2000
    assert degrees.max() > 20 * np.median(degrees)
    counts = np.bincount(relations, minlength=20)
    assert counts.argmax() == 0 and counts[0] > 5 * counts[-1] > 0
    hubs = np.argsort(degrees)[-10:]
    assert hubs.std() > 200  # not neighbours


def test_blocks_make_the_same_rows_as_the_whole(monkeypatch):
    """The same seed gives the same rows, another seed others; a block needs none of those before it."""
    monkeypatch.setattr(synthetic, "BLOCK_ROWS", 1000)
    shape = synthetic.Shape(500, 5, 2500, seed=1)
    whole = [
        np.column_stack(synthetic.edges(shape, start, min(start + 1000, 2500))) for start in (0, 1000, 2000)
    ]
    again = np.column_stack(synthetic.edges(shape, 1000, 2000))
    assert np.array_equal(whole[1], again)
    other = synthetic.edges(synthetic.Shape(500, 5, 2500, seed=2), 0, 1000)
    assert (np.column_stack(other) != whole[0]).mean() > 0.5
    tables = [table.to_pandas() for table in synthetic.blocks(shape)]
    assert list(pd.concat(tables)["head"]) == [f"e{head}" for block in whole for head in block[:, 0]]


@pytest.mark.parametrize("kind", ["tsv", "parquet"])
def test_the_partition_tool_reads_it(kind, tmp_path):
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), "--output", str(tmp_path / "triples"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    done = run("--edges", "10", "--held-out", "5")
    assert done.returncode == 2 and "more edges than are held out" in done.stderr
    assert not (tmp_path / "triples").exists()
    words = ["--entities", "300", "--relations", "7", "--edges", "2000", "--held-out", "50", "--format", kind]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    partition_triples([tmp_path / "triples"], tmp_path / "dataset", Options(), None)
    dataset = Dataset.open(tmp_path / "dataset")
    assert [len(dataset.split(split)) for split in ("train", "valid", "test")] == [1900, 50, 50]
    assert dataset.num_entities("entity") == 300 and len(dataset.relations) == 7
    assert not np.array_equal(dataset.split("valid"), dataset.split("test"))
    again = run(*words)
    assert again.returncode == 2 and "triples exists" in again.stderr
