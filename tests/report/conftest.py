"""Two untrained runs on a graph whose names are hostile text, and their page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from dglkge.data.dataset import Dataset
from tests.checkpoint.toy_checkpoint import save_toy_run
from tests.toy_kg import partition, typed_triples, write_splits

HOSTILE = {
    "person0": "<script>window.broken = 1</script>",
    "person1": "</script><script>window.broken = 2</script>",
    "person2": '"><img src=x onerror="window.broken = 3">',
    "town0": "<b>Rome</b> & %{x} {{ 7 * 7 }}",
    "near": "<i onclick=alert(1)>near</i>",
}
"""Names of the toy graph, and what they are called here."""


@dataclass(frozen=True)
class Runs:
    """Folders of two runs, and of their data set."""

    first: Path
    second: Path
    dataset: Dataset


def stats_lines() -> list[dict]:
    """Three epochs of two reports; the second epoch was begun twice."""
    places = [(0, 2), (0, 4), (1, 2), (1, 2), (1, 4), (2, 2), (2, 4)]
    lines: list[dict] = []
    for number, (epoch, done) in enumerate(places):
        line = {
            "epoch": epoch,
            "batches_done": done,
            "num_batches": 4,
            "loss": 7.0 - number,
            "epoch_loss": 3.0,
        }
        line |= {"edges_per_second": 100.0, "epoch_seconds": done * 1.5, "bytes_sent": 10 * done}
        if done == 4:
            line |= {
                "num_trainers": 2,
                "trainer_memory_bytes": 2**30,
                "phase_seconds": {"score": 1.0, "loss": 3.0},
            }
        lines.append(line)
        if done == 4:
            lines.append({"epoch": epoch, "valid": {"mrr": 0.1 * (epoch + 1), "num_queries": 20}})
    return lines


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Runs:
    """Runs in two parts on a data set in two partitions."""
    folder = tmp_path_factory.mktemp("report")
    frame, types = typed_triples()
    frame = frame.replace(HOSTILE)
    write_splits_as_csv(folder / "source", frame)
    lines = "".join(f"{HOSTILE.get(name, name)}\t{kind}\n" for name, kind in types.items())
    (folder / "types.tsv").write_text(lines, encoding="utf-8")
    options = ["--entity-types", str(folder / "types.tsv"), "--method", "random", "--num-parts", "2"]
    dataset = Dataset.open(partition(folder / "source", folder / "dataset", *options))
    found = Runs(
        save_toy_run(folder / "first", dataset), save_toy_run(folder / "second <b>", dataset), dataset
    )
    text = "".join(json.dumps(line) + "\n" for line in stats_lines())
    (found.first / "stats.jsonl").write_text(text + '{"epoch": 3, "batch', encoding="utf-8")
    return found


def write_splits_as_csv(folder: Path, frame: pd.DataFrame) -> None:
    """Write the splits without the quotes of CSV, which one name has."""
    write_splits(folder, frame)
    for path in folder.glob("*.tsv"):
        part = pd.read_csv(path, sep="\t", header=None)
        rows = ("\t".join(row) + "\n" for row in part.itertuples(index=False))
        path.write_text("".join(rows), encoding="utf-8")


@pytest.fixture(scope="session")
def page(runs, tmp_path_factory) -> Path:
    """The page of both runs."""
    pytest.importorskip("plotly", reason="plotly is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from dglkge.cli.main import main

    target = tmp_path_factory.mktemp("page") / "report.html"
    arguments = ["report", runs.first, runs.second, "--output", target]
    assert main([str(argument) for argument in arguments]) == 0
    return target
