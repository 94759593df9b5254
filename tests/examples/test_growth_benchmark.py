"""The growth benchmark: exponents of known costs, and a small graph through partitioning."""

from __future__ import annotations

import json

import pytest

import growth
from dglkge.data.dataset import Dataset
from measuring import run_figures
from tests.examples.scripts import run_script


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_exponent_of_known_costs():
    exponent = growth.exponent
    assert exponent([3.0], [10]) is None
    assert exponent([3.0, 30.0], [10, 100]) == pytest.approx(1)
    assert exponent([5.0, 3.0, 3.0], [1, 10, 1000]) == pytest.approx(0)
    assert exponent([2.0, 8.0], [4, 8]) == pytest.approx(2)


def test_partition_a_small_graph(tmp_path):
    """Beside a plain read of the same file; the graph stays for other tables."""
    work, figures = tmp_path / "work", tmp_path / "figures.json"
    words = ["partition", "--values", "3000", "--work", str(work), "--json", str(figures)]
    done = run_script("benchmarks/growth.py", *words)
    row = cells(done.stdout.splitlines()[-1])
    assert row[0] == "3,000" and row[2] == "" and float(row[1]) > 0 and row[4].endswith("×")
    (row,) = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    assert row["ours"]["peak_bytes"] > 0 and row["pyarrow"]["seconds"] > 0
    assert len(Dataset.open(work / "dataset-3000").split("test")) == 1000
    assert (work / "pyarrow.log").read_text() == "1000\n"


@pytest.mark.parametrize(
    "axis, fixed", [("negatives", "model.dimension=200"), ("sizes", "model.dimension=50")]
)
def test_rows_of_jobs(monkeypatch, tmp_path, axis, fixed):
    """What grows reaches the job, all else stays; processor time per edge grows with its square root here."""
    jobs = []

    def train(config, sets, num_trainers, folder, limit_seconds, max_batches, max_epochs):
        jobs.append((set(sets), num_trainers, max_batches, max_epochs))
        size = 10 ** (2 * len(jobs))
        epochs = [run_figures.Epoch(1000, 9.0, 9.0), run_figures.Epoch(1000, 2.0, 0.01 * size**0.5)]
        return run_figures.RunFigures(epochs, 11.0, 3.5, 10**9, 20.0, 30.0)

    monkeypatch.setattr(growth.our_job, "train", train)
    monkeypatch.setattr(growth, "dataset_of", lambda num, work: work / f"made-{num}")
    args = growth.build_parser().parse_args([axis, "--dataset", "d", "--batches", "7"])
    lines, rows = growth.job_rows(args, [100, 10_000], tmp_path)
    first, second = map(cells, lines[-2:])
    assert first[:4] == ["100", "500", "100.00", ""] and second[:4] == ["10,000", "500", "1000.00", "0.50"]
    assert [row["value"] for row in rows] == [100, 10_000]
    for (sets, *rest), value in zip(jobs, (100, 10_000)):
        assert rest == [2, 7, 2] and fixed in sets
        grown = f"dataset={tmp_path}/made-{value}" if axis == "sizes" else f"negatives.num_uniform={value}"
        assert grown in sets


def test_dimension_needs_a_dataset(capsys):
    with pytest.raises(SystemExit, match="2"):
        growth.main(["dimension"])
    assert "dimension needs --dataset" in capsys.readouterr().err
