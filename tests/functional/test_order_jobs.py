"""Jobs in the order of buckets and of machines, with tables on a disk, on one host and on two."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.data.range_walk import range_bounds, ranges_of
from dglkge.distributed.jobs import is_on_disk
from tests.functional import job as commands
from tests.functional.results import (
    assert_near,
    datasets,
    json_lines,
    losses,
    progress,
    records,
    stats,
    tables,
)
from tests.functional.simulated_hosts import train_on_hosts
from tests.toy_kg import toy_dataset


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_answers_in_the_range_of_the_query_score_less(tmp_path: Path, kernels: str) -> None:
    """With rows of zeros nothing but the offset is in the loss, and it can be written down."""
    count, dataset = 3000, Dataset.open(toy_dataset())
    commands.train_alone(
        *(f"dataset={toy_dataset()}", f"output={tmp_path}", "training.num_epochs=1", "evaluation.split=none"),
        *("loss.name=softmax", f"negatives.num_uniform={count}", "negatives.own_entity=false"),
        *("regularizer.name=none", "model.init_scale=1e-30", "model.score_function=complex"),
        *("sampling.num_ranges=4", "training.matmul_dtype=float32", f"training.kernels={kernels}"),
        *("model.dimension=16", "negatives.chunk_size=16", "training.batch_size=32"),
    )
    layout = dataset.layout()
    ids = np.asarray(layout.node_ids("entity"))[dataset.split("train")[:, [0, 2]]]
    ranges = ranges_of(ids, range_bounds(layout.range_starts("entity"), 4), 4)
    is_inside = (ranges[:, 0] == ranges[:, 1]).mean()
    # 15 entities in each of the two ranges; a third of the weight in the query's own; the truth is left out.
    across = np.log(1 + count * (15 / 3 + 14) / 30)
    inside = np.log(1 / 3 + count * (14 / 3 + 15) / 30) + np.log(3)
    expected = 2 * (is_inside * inside + (1 - is_inside) * across)
    assert stats(tmp_path)[-1]["epoch_loss"] == pytest.approx(expected, abs=0.01)


def test_tables_on_a_disk_are_those_in_memory(tmp_path: Path) -> None:
    """Two trainers with a server; ranges are read ahead and pushed out on the disk."""
    if not is_on_disk(tmp_path):
        pytest.skip(f"{tmp_path} is in memory; set TMPDIR to a folder on a disk")
    contents = []
    for storage in ("memory", "disk"):
        folder = tmp_path / storage
        folder.mkdir()
        settings = (
            *(f"dataset={toy_dataset()}", f"output={folder / 'run'}", "evaluation.split=none"),
            *("model.dimension=16", "training.num_epochs=2", "training.batch_size=30"),
            *("negatives.num_uniform=20", "optimizer.name=row_adagrad", "training.matmul_dtype=float32"),
            *("sampling.num_ranges=4", "sampling.buckets=directed", f"tables.storage={storage}"),
            f"tables.folder={folder / 'tables'}",
        )
        commands.train(folder, 2, *settings)
        contents.append(datasets(folder / "run"))
    # Removed with the job.
    assert list((tmp_path / "disk" / "tables").iterdir()) == []
    memory, disk = contents
    assert {"embeddings_entity_0:embeddings", "embeddings_entity_0:optimizer/sum"} <= set(memory)
    assert_near(disk, memory, 0, 0)
    assert {line["num_buckets"] for line in stats(tmp_path / "disk" / "run")} == {16}


SCRIPT = str(Path(__file__).with_name("elastic_train.py"))
SETTINGS = (
    *("model.dimension=16", "model.init_scale=0.1", "training.matmul_dtype=float32", "training.num_epochs=3"),
    *("training.batch_size=20", "negatives.num_uniform=20", "negatives.chunk_size=5"),
    "evaluation.split=none",
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
        batches = trained(run)
        owned = [set(layout.edge_table(part).triple_ids.tolist()) for part in (0, 1)]
        counters: list[Counter[int]] = [Counter() for _ in range(3)]
        sizes: Counter[tuple[int, int]] = Counter()
        for machine, epoch, index, _, ids in batches:
            assert set(ids) <= owned[machine]
            counters[epoch].update(ids)
            sizes[epoch, index] += len(ids)
        for counter in counters:
            # The same triples in every epoch, each once.
            assert counter == dict.fromkeys(counters[0], 1) and len(counter) == num_triples - num_held
        assert all(sizes[epoch, index] == size for _, epoch, index, size, _ in batches)
    assert sum(counts[:2]) == num_triples - num_held
