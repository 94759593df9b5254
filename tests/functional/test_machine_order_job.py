"""Jobs in the order of the machines: the same for one and two trainers of a host, resumed or not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from tests.functional import job as commands
from tests.functional.simulated_hosts import train_on_hosts
from tests.functional.test_elastic_job import loss_curve
from tests.functional.test_same_result_everywhere import tables
from tests.functional.test_storage_and_passes import records
from tests.toy_kg import toy_dataset

SCRIPT = str(Path(__file__).with_name("stopping_train.py"))
SETTINGS = (
    "model.dimension=16",
    "model.init_scale=0.1",
    "training.matmul_dtype=float32",
    "training.num_epochs=3",
    "training.batch_size=20",
    "negatives.num_uniform=20",
    "negatives.chunk_size=5",
    "evaluation.split=none",
)
STOPPED = 143


def trained(folder: Path) -> list[tuple[int, int, int, int, list[int]]]:
    """Return (machine, epoch, batch, its size, triple ids) of all batches of all trainers."""
    return [
        (int(path.stem.split("-")[2]), *json.loads(line))
        for path in folder.glob("trained-*.jsonl")
        for line in path.read_text().splitlines()
    ]


def test_one_and_two_trainers_of_two_hosts_train_the_same(tmp_path: Path) -> None:
    """With held-out triples; the second run is stopped inside an epoch and has two trainers from there on."""
    dataset = toy_dataset(2, True, "metis")
    settings = (*SETTINGS, "evaluation.held_out.fraction=0.1", "training.edge_chunks=2")
    whole, cut = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    for run in (whole, cut):
        run.parent.mkdir()
    train_on_hosts(tmp_path / "job", dataset, 1, f"output={whole}", *settings, script=SCRIPT)
    (cut.parent / "stop").write_text("1 1")
    train_on_hosts(
        tmp_path / "first", dataset, 1, f"output={cut}", *settings, script=SCRIPT, statuses=(0, STOPPED)
    )
    (cut.parent / "stop").unlink()
    progress = open_checkpoint(cut).meta.progress
    assert (progress["finished_epochs"], progress["batches_done"]) == (1, 2) and progress["order_mark"] > 0
    train_on_hosts(tmp_path / "second", dataset, 2, f"output={cut}", *settings, script=SCRIPT)
    losses = dict(loss_curve(whole))
    assert dict(loss_curve(cut)) == {place: pytest.approx(loss, rel=1e-4) for place, loss in losses.items()}
    for name, rows in tables(dataset, whole).items():
        np.testing.assert_allclose(tables(dataset, cut)[name], rows, rtol=1e-3, atol=1e-4, err_msg=name)
    counts = [record["stats"]["count"] for record in records(whole)]
    assert counts == [record["stats"]["count"] for record in records(cut)]
    num_triples = len(Dataset.open(dataset).split("train"))
    num_held = -(-num_triples // 10)
    layout = Dataset.open(dataset).layout()
    for run in (whole, cut):
        found = trained(run.parent)
        owned = [set(layout.edge_table(part).triple_ids.tolist()) for part in (0, 1)]
        seen: list[Counter[int]] = [Counter() for _ in range(3)]
        sizes: Counter[tuple[int, int]] = Counter()
        for machine, epoch, index, _, ids in found:
            assert set(ids) <= owned[machine]
            seen[epoch].update(ids)
            sizes[epoch, index] += len(ids)
        for of_epoch in seen:
            # The same triples in every epoch, each once.
            assert of_epoch == dict.fromkeys(seen[0], 1) and len(of_epoch) == num_triples - num_held
        assert all(sizes[epoch, index] == size for _, epoch, index, size, _ in found)
    assert sum(counts[:2]) == num_triples - num_held


def table_bytes(run: Path, dataset: Path) -> dict[str, Any]:
    """Return all rows of a run as they lie in memory."""
    return {name: rows.tobytes() for name, rows in tables(dataset, run).items()}


def test_on_one_machine_the_orders_are_one(tmp_path: Path) -> None:
    runs = {}
    for order in ("machine", "global"):
        run = tmp_path / order
        done = commands.train_alone(
            f"dataset={toy_dataset()}", f"output={run}", f"sampling.order={order}", *SETTINGS
        )
        assert done.returncode == 0, done.stderr
        runs[order] = table_bytes(run, toy_dataset())
    assert runs["machine"] == runs["global"]
