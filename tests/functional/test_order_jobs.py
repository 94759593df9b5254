"""Jobs in the order of buckets and of machines: killed, resized and resumed, on one host and on two."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.data.range_walk import range_bounds, ranges_of
from dglkge.launch.table_storage import MEMORY_FILE_SYSTEMS, file_system
from tests import warm
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
from tests.functional.test_elastic_job import (
    NUM_EPOCHS,
    assert_same_training,
    script,
    stop_in_epoch_2,
    train_resized,
)
from tests.toy_kg import toy_dataset

BUCKETS = {"sampling.num_ranges": "4", "training.matmul_dtype": "float32"}


def run_alone(folder: Path, *words: str, **changes: str) -> Path:
    """Run the script in one process to its end; returns the run."""
    commands.run([*warm.python(), *script(toy_dataset(), folder, *words, **BUCKETS, **changes)])
    return folder / "run"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_alone(tmp_path_factory.mktemp("undisturbed"))


def test_statistics_name_the_bucket(undisturbed: Path) -> None:
    lines = stats(undisturbed)
    for epoch in range(NUM_EPOCHS):
        turns = [line["bucket_number"] for line in lines if line["epoch"] == epoch]
        assert turns == sorted(turns) and turns[-1] == 5
    assert {line["num_buckets"] for line in lines} == {6}
    assert all(line["bucket"][0] < line["bucket"][1] for line in lines)
    assert all(0 <= number < 4 for line in lines for number in line["bucket"])


def toy_ranges(dataset: Dataset) -> np.ndarray:
    """Return the range of the head and of the tail of each training triple, (n, 2), with P = 4."""
    layout = dataset.layout()
    bounds = range_bounds(layout.range_starts("entity"), 4)
    triples = dataset.split("train")[:, [0, 2]]
    return ranges_of(np.asarray(layout.node_ids("entity"))[triples], bounds, 4)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_answers_in_the_range_of_the_query_score_less(tmp_path: Path, kernels: str) -> None:
    """With rows of zeros nothing but the offset is in the loss, and it can be written down."""
    count = 3000
    changes = {
        "loss.name": "softmax",
        "negatives.num_uniform": str(count),
        "negatives.own_entity": "false",
        "regularizer.name": "none",
        "model.init_scale": "1e-30",
        "training.num_epochs": "1",
        "training.kernels": kernels,
        "model.score_function": "complex",
    }
    last = stats(run_alone(tmp_path, **changes))[-1]
    ranges = toy_ranges(Dataset.open(toy_dataset()))
    is_inside = (ranges[:, 0] == ranges[:, 1]).mean()
    # 15 entities in each of the two ranges; a third of the weight in the query's own; the truth is left out.
    across = np.log(1 + count * (15 / 3 + 14) / 30)
    inside = np.log(1 / 3 + count * (14 / 3 + 15) / 30) + np.log(3)
    expected = 2 * (is_inside * inside + (1 - is_inside) * across)
    assert last["epoch_loss"] == pytest.approx(expected, abs=0.01)


def test_two_three_and_one_trainers_continue_a_bucket(undisturbed: Path, tmp_path: Path) -> None:
    ends = (("client", 1, signal.SIGKILL), ("client", 2, signal.SIGTERM))
    starts = train_resized(tmp_path, ends, ("1 2 1 kill", "2 3 2 stop"), **BUCKETS)
    assert starts == [(0, 0), (0, 4), (2, 4)]
    assert_same_training(tmp_path / "run", undisturbed)


@pytest.mark.usefixtures("in_foreground")
def test_a_resume_inside_a_bucket_is_bit_identical(undisturbed: Path, tmp_path: Path) -> None:
    stop_in_epoch_2(tmp_path, **BUCKETS)
    assert_near(tables(run_alone(tmp_path)), tables(undisturbed), 0, 0)


def test_tables_on_a_disk_are_those_in_memory(tmp_path: Path) -> None:
    """Two trainers with a server; ranges are read ahead and pushed out on the disk."""
    if file_system(tmp_path) in MEMORY_FILE_SYSTEMS:
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


def test_two_hosts_walk_over_their_own_pairs(tmp_path: Path) -> None:
    dataset, run = toy_dataset(2, typed=True, method="metis"), tmp_path / "run"
    settings = (
        *(f"output={run}", "model.dimension=8", "training.num_epochs=1", "training.batch_size=30"),
        *("negatives.num_uniform=10", "negatives.local_share=0.5", "negatives.global_share=0.5"),
        *("negatives.degree_power=0.5", "sampling.num_ranges=3", "sampling.bucket_order=affinity"),
        *("evaluation.split=none", "checkpoint.every_batches=2"),
    )
    train_on_hosts(tmp_path / "job", dataset, 2, *settings)
    last = stats(run)[-1]
    assert last["num_buckets"] == 3 and last["bytes_sent"] > 0 and np.isfinite(last["epoch_loss"])
    assert progress(run) == (1, 0)


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


def test_on_one_machine_the_orders_are_one(tmp_path: Path) -> None:
    for order in ("machine", "global"):
        commands.train_alone(
            f"dataset={toy_dataset()}", f"output={tmp_path / order}", f"sampling.order={order}", *SETTINGS
        )
    assert_near(tables(tmp_path / "machine"), tables(tmp_path / "global"), 0, 0)
