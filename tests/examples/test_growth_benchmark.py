"""The growth benchmark: exponents of known costs, and a small graph through partitioning and a job."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.functional.job import environment
from tests.toy_kg import REPOSITORY

SCRIPT = REPOSITORY / "examples" / "benchmarks" / "growth.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=240, env=environment()
    )


def cells(line: str) -> list[str]:
    """The cells of a row of a table."""
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_exponent_of_known_costs(benchmark_module):
    exponent = benchmark_module("growth").exponent
    assert exponent([3.0], [10]) is None
    assert exponent([3.0, 30.0], [10, 100]) == pytest.approx(1)
    assert exponent([5.0, 3.0, 3.0], [1, 10, 1000]) == pytest.approx(0)
    assert exponent([2.0, 8.0], [4, 8]) == pytest.approx(2)


def test_partition_and_train_a_small_graph(tmp_path):
    """The graph that one table has partitioned is there for the other."""
    work = tmp_path / "work"
    done = run("partition", "--values", "3000,6000", "--work", str(work), "--json", str(tmp_path / "p.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (cells(line) for line in done.stdout.splitlines()[2:])
    assert first[0] == "3,000" and second[0] == "6,000" and first[2] == "" and float(second[2]) < 2
    figures = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))["rows"]
    assert [row["value"] for row in figures] == [3000, 6000]
    assert all(row["ours"]["peak_bytes"] > 0 and row["pandas"]["seconds"] > 0 for row in figures)
    made = (work / "dataset-3000" / "dataset.json").stat().st_mtime_ns
    done = run(
        *("sizes", "--values", "3000", "--work", str(work), "--trainers", "1", "--batches", "2"),
        *("--dimension", "8", "--negatives", "10"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = cells(done.stdout.splitlines()[-1])
    assert row[0] == "3,000" and float(row[1].replace(",", "")) > 0 and float(row[5]) > 0.1
    assert (work / "dataset-3000" / "dataset.json").stat().st_mtime_ns == made
    assert not list((work / "job-sizes-3000" / "run").glob("checkpoint/*.h5"))  # nothing was committed


def test_dimension_needs_a_dataset():
    done = run("dimension")
    assert done.returncode == 2 and "dimension needs --dataset" in done.stderr
