"""Jobs in the order of the machines: the same for one and two trainers of a host, resumed or not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from tests.functional import job as commands
from tests.functional.results import assert_near, json_lines, losses, progress, records, tables
from tests.functional.simulated_hosts import train_on_hosts
from tests.toy_kg import toy_dataset

SCRIPT = str(Path(__file__).with_name("elastic_train.py"))
SETTINGS = (
    *("model.dimension=16", "model.init_scale=0.1", "training.matmul_dtype=float32", "training.num_epochs=3"),
    *(
        "training.batch_size=20",
        "negatives.num_uniform=20",
        "negatives.chunk_size=5",
        "evaluation.split=none",
    ),
)
STOPPED = 143


def trained(run: Path) -> list[tuple[int, int, int, int, list[int]]]:
    """Return (machine, epoch, batch, its size, triple ids) of all batches of all trainers."""
    return [
        (int(path.stem.split("-")[1]), *line)
        for path in run.glob("trained-*.jsonl")
        for line in json_lines(path)
        if len(line) > 2
    ]


def test_one_and_two_trainers_of_two_hosts_train_the_same(tmp_path: Path) -> None:
    """With held-out triples; the second run is stopped inside an epoch and has two trainers from there on."""
    dataset = toy_dataset(2, True, "metis")
    settings = (*SETTINGS, "evaluation.held_out.fraction=0.1", "training.edge_chunks=2")
    whole, cut = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    for run in (whole, cut):
        run.parent.mkdir()
    train_on_hosts(tmp_path / "job", dataset, 1, f"output={whole}", *settings, script=SCRIPT)
    (cut.parent / "hold").write_text("1 1 0 signal")
    train_on_hosts(
        tmp_path / "first", dataset, 1, f"output={cut}", *settings, script=SCRIPT, statuses=(0, STOPPED)
    )
    (cut.parent / "hold").unlink()
    assert progress(cut) == (1, 2) and open_checkpoint(cut).meta.progress["order_mark"] > 0
    train_on_hosts(tmp_path / "second", dataset, 2, f"output={cut}", *settings, script=SCRIPT)
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-4)
    assert_near(tables(cut), tables(whole), 1e-3, 1e-4)
    counts = [record["stats"]["count"] for record in records(whole)]
    assert counts == [record["stats"]["count"] for record in records(cut)]
    num_triples = len(Dataset.open(dataset).split("train"))
    num_held = -(-num_triples // 10)
    layout = Dataset.open(dataset).layout()
    for run in (whole, cut):
        found = trained(run)
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


def test_on_one_machine_the_orders_are_one(tmp_path: Path) -> None:
    for order in ("machine", "global"):
        commands.train_alone(
            f"dataset={toy_dataset()}", f"output={tmp_path / order}", f"sampling.order={order}", *SETTINGS
        )
    assert_near(tables(tmp_path / "machine"), tables(tmp_path / "global"), 0, 0)
