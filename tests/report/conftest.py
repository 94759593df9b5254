"""Two untrained runs on a graph whose names are hostile text, and their page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from dglkge.data.dataset import Dataset
from tests.checkpoint.toy_checkpoint import save_toy_run
from tests.chromium import browser, open_page  # noqa: F401
from tests.cli.conftest import refusal  # noqa: F401
from tests.report.toy_report import HOSTILE, stats_lines
from tests.toy_kg import partition, typed_triples, write_splits


@dataclass(frozen=True)
class Runs:
    """Folders of two runs, and of their data set."""

    first: Path
    second: Path
    dataset: Dataset


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Runs:
    """Runs in two parts on a data set in two partitions."""
    folder = tmp_path_factory.mktemp("report")
    frame, types = typed_triples()
    frame = frame.replace(HOSTILE)
    write_plain_splits(folder / "source", frame)
    lines = "".join(f"{HOSTILE.get(name, name)}\t{kind}\n" for name, kind in types.items())
    (folder / "types.tsv").write_text(lines, encoding="utf-8")
    options = ["--entity-types", str(folder / "types.tsv"), "--method", "random", "--num-parts", "2"]
    dataset = Dataset.open(partition(folder / "source", folder / "dataset", *options))
    runs = Runs(
        save_toy_run(folder / "first", dataset), save_toy_run(folder / "second <b>", dataset), dataset
    )
    text = "".join(json.dumps(line) + "\n" for line in stats_lines())
    (runs.first / "stats.jsonl").write_text(text + '{"epoch": 3, "batch', encoding="utf-8")
    return runs


def write_plain_splits(folder: Path, frame: pd.DataFrame) -> None:
    """Write the splits without the quotes of CSV, which one name has."""
    write_splits(folder, frame)
    for path in folder.glob("*.tsv"):
        part = pd.read_csv(path, sep="\t", header=None)
        rows = ("\t".join(row) + "\n" for row in part.itertuples(index=False))
        path.write_text("".join(rows), encoding="utf-8")


@pytest.fixture(scope="session")
def page(runs, tmp_path_factory) -> Path:
    pytest.importorskip("plotly", reason="plotly is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from dglkge.cli.main import main

    target = tmp_path_factory.mktemp("page") / "report.html"
    arguments = ["report", runs.first, runs.second, "--output", target]
    assert main([str(argument) for argument in arguments]) == 0
    return target
