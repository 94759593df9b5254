"""Two untrained runs on a graph whose names are hostile text, and their page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from dglkge.data.dataset import Dataset
from tests.checkpoint.toy_checkpoint import save_toy_run
from tests.chromium import browser, open_page  # noqa: F401
from tests.cli.conftest import refusal  # noqa: F401
from tests.serving.conftest import renamed_dataset

HOSTILE = {
    "person0": "<script>window.broken = 1</script>",
    "person1": "</script><script>window.broken = 2</script>",
    "person2": '"><img src=x onerror="window.broken = 3">',
    "town0": "<b>Rome</b> & %{x} {{ 7 * 7 }}",
    "near": "<i onclick=alert(1)>near</i>",
}


def stats_lines() -> list[dict]:
    """Three epochs of two reports; the second epoch was begun twice."""
    places = [(0, 2), (0, 4), (1, 2), (1, 2), (1, 4), (2, 2), (2, 4)]
    lines: list[dict] = []
    for number, (epoch, done) in enumerate(places):
        place = {"epoch": epoch, "batches_done": done, "num_batches": 4, "epoch_seconds": done * 1.5}
        numbers = {"loss": 7.0 - number, "epoch_loss": 3.0, "edges_per_second": 100.0, "bytes_sent": done}
        lines.append({**place, **numbers})
        if done == 4:
            phases = {"phase_seconds": {"score": 1.0, "loss": 3.0}}
            lines[-1] |= {"num_trainers": 2, "trainer_memory_bytes": 2**30, **phases}
            lines.append({"epoch": epoch, "valid": {"mrr": 0.1 * (epoch + 1), "num_queries": 20}})
    return lines


class Runs(NamedTuple):
    first: Path
    second: Path
    dataset: Dataset


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("report")
    dataset = renamed_dataset(folder, HOSTILE, 2)
    first, second = (save_toy_run(folder / name, dataset) for name in ("first", "second <b>"))
    text = "".join(json.dumps(line) + "\n" for line in stats_lines())
    (first / "stats.jsonl").write_text(text + '{"epoch": 3, "batch', encoding="utf-8")
    return Runs(first, second, dataset)


@pytest.fixture(scope="session")
def page(runs, tmp_path_factory) -> Path:
    from dglkge.cli.main import main

    target = tmp_path_factory.mktemp("page") / "report.html"
    arguments = ["report", runs.first, runs.second, "--output", target]
    assert main([str(argument) for argument in arguments]) == 0
    return target
