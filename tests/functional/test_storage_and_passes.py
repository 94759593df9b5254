"""Jobs with a copy at a URL, chunks and held-out triples: going on elsewhere gives the same tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.partition.extend import extend_dataset
from dglkge.training.statistics.passes import USAGE
from tests.functional.job import dglkge, train, train_alone
from tests.functional.results import assert_near, json_lines, progress, records, stats, tables
from tests.functional.simulated_hosts import train_on_hosts
from tests.toy_kg import toy_dataset

SETTINGS = (
    *("model.dimension=8", "training.batch_size=40", "negatives.chunk_size=10", "negatives.num_uniform=10"),
    *("training.matmul_dtype=float32", "training.edge_chunks=2", "evaluation.held_out.fraction=0.1"),
    "evaluation.held_out.uniform_negatives=20",
)
PASSES_OF_TWO_SETS = [(epoch, edge_set, chunk) for epoch in (0, 1) for edge_set in (0, 1) for chunk in (0, 1)]


def place(record: dict[str, Any]) -> tuple[int, int, int]:
    return record["epoch_idx"], record["edge_path_idx"], record["edge_chunk_idx"]


def assert_records_near(run: Path, expected: Path) -> None:
    """Hold that two runs have walked over the same passes, with nearly the same held-out metrics."""
    for record, other in zip(records(run), records(expected), strict=True):
        assert place(record) == place(other) and record.keys() == other.keys()
        assert record["stats"]["count"] == other["stats"]["count"]
        # A pass without a batch of its own, as the second chunk of a small set, has no numbers from before.
        for name in record.keys() & {"eval_stats_before", "eval_stats_after"}:
            assert record[name]["count"] == other[name]["count"]
            assert record[name]["metrics"] == pytest.approx(other[name]["metrics"], rel=0.02, abs=0.02)


def with_more(dataset: Path, folder: Path, lines: list[str]) -> Path:
    """Return a data set with an edge set ``more`` of these lines."""
    (folder / "more.tsv").write_text("".join(lines))
    extend_dataset(dataset, [folder / "more.tsv"], folder / f"extended-{dataset.parent.name}", "more")
    return folder / f"extended-{dataset.parent.name}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Three epochs in one process, without a copy."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train_alone(*SETTINGS, f"dataset={toy_dataset()}", f"output={folder}", "training.num_epochs=3")
    return folder


def test_a_run_goes_on_from_its_copy(alone, tmp_path):
    copy, common = tmp_path / "bucket" / "run", (*SETTINGS, f"dataset={toy_dataset()}")
    common += (f"checkpoint.storage=file://{copy}",)
    train_alone(*common, f"output={tmp_path / 'a'}", "training.num_epochs=1")
    second = train_alone(*common, f"output={tmp_path / 'b'}", "training.num_epochs=3")
    assert "resumed: 1 epochs" in second.stderr
    for run in (tmp_path / "b", copy):
        open_checkpoint(run, verify=True)
        assert_near(tables(run), tables(alone), 0, 0)
    assert records(tmp_path / "b") == records(alone)
    # The metrics of the end, written after the last version, are there too.
    for name in ("metrics.json", "stats.jsonl"):
        assert (copy / name).read_text() == (tmp_path / "b" / name).read_text()


def test_held_out_triples_are_never_trained_by_any_number_of_trainers(alone, tmp_path):
    passes = records(alone)
    assert [place(record) for record in passes] == [(e, 0, c) for e in range(3) for c in (0, 1)]
    num_triples = len(Dataset.open(toy_dataset()).split("train"))
    for first, second in zip(passes[::2], passes[1::2]):
        held = first["eval_stats_before"]["count"] + second["eval_stats_before"]["count"]
        trained = first["stats"]["count"] + second["stats"]["count"]
        assert held + trained == num_triples and held == -(-num_triples // 10)
    # The numbers after a pass are those before the same triples' next pass, but for what the other trained.
    assert passes[0]["eval_stats_after"] != passes[0]["eval_stats_before"]
    url = f"file://{tmp_path}/bucket/run"
    more = (f"dataset={toy_dataset()}", f"output={tmp_path / 'run'}", f"checkpoint.storage={url}")
    train(tmp_path, 2, *SETTINGS, *more, "training.num_epochs=3")
    assert_records_near(tmp_path / "run", alone)
    assert json.loads(dglkge("inspect", url, "--json").stdout)["version"] == 6


def test_two_hosts_walk_over_the_same_sets(tmp_path):
    """Sets, chunks, held-out and touched rows belong to triples, not to machines."""
    lines = [*(f"e{i:03d}\tturn_1\te{900 + i % 3}\n" for i in range(30)), "e900\tspin\te007\n"]
    one, two = (with_more(toy_dataset(parts), tmp_path, lines) for parts in (1, 2))
    settings = (*SETTINGS, "training.edge_sets=[more, train]", "training.num_epochs=2")
    settings += ("sampling.order=global",)
    hosts, copy, alone = tmp_path / "hosts", tmp_path / "bucket" / "run", tmp_path / "alone"
    words = (f"output={hosts}", f"checkpoint.storage=file://{copy}")
    train_on_hosts(tmp_path / "job", two, 1, *settings, *words)
    train_alone(*settings, f"dataset={one}", f"output={alone}")
    open_checkpoint(copy, verify=True)
    assert_near(tables(copy), tables(alone), 0, 1e-5)
    assert_records_near(hosts, alone)
    assert [place(record) for record in records(hosts)] == PASSES_OF_TWO_SETS


def test_sets_are_walked_in_bucket_order(tmp_path):
    """A run that ends after an epoch and goes on has the tables and records of one that did not end."""
    data = with_more(toy_dataset(), tmp_path, [f"e{i:03d}\tturn_1\te{i + 20:03d}\n" for i in range(30)])
    settings = (*SETTINGS, f"dataset={data}", "training.edge_sets=[more, train]", "training.batch_size=10")
    settings += ("sampling.num_ranges=3",)
    for name, epochs in (("whole", 2), ("resumed", 1), ("resumed", 2)):
        train_alone(*settings, f"output={tmp_path / name}", f"training.num_epochs={epochs}")
    assert_near(tables(tmp_path / "resumed"), tables(tmp_path / "whole"), 0, 0)
    buckets, usage = records(tmp_path / "whole"), {"seconds", "mb_per_second", *USAGE}
    assert all(record.keys() >= {"stats", *usage} for record in buckets)
    for record, other in zip(records(tmp_path / "resumed"), buckets, strict=True):
        assert all(record[name] == other[name] for name in other.keys() - usage)
    places = [place(record) for record in buckets]
    assert list(dict.fromkeys(places)) == PASSES_OF_TWO_SETS
    # Three mixed buckets of each set.
    numbers = [record["index"] for record in buckets]
    assert numbers == sorted(set(numbers))
    assert [PASSES_OF_TWO_SETS[number // 3] for number in numbers] == places
    num_triples = len(Dataset.open(data).split("train"))
    for epoch in (0, 1):
        passes = [record for record in buckets if record["epoch_idx"] == epoch]
        held_out = sum(line["eval_stats_after"]["count"] for line in passes if "eval_stats_after" in line)
        assert held_out == 3 + -(-(num_triples - 30) // 10)
        assert held_out + sum(record["stats"]["count"] for record in passes) == num_triples
    # One of the sets, and all triples: each has buckets of its own.
    for name, sets, expected in (("old", "[train]", num_triples - 30), ("all", "[]", num_triples)):
        words = (*settings, f"training.edge_sets={sets}", "evaluation.held_out=")
        train_alone(*words, f"output={tmp_path / name}", "training.num_epochs=1")
        assert sum(record["stats"]["count"] for record in records(tmp_path / name)) == expected
    lines = json_lines(tmp_path / "all" / "stats.jsonl")
    shown = [line["bucket_record"] for line in lines if "bucket_record" in line]
    assert shown == records(tmp_path / "all")


def test_two_machines_have_buckets_of_their_own(tmp_path):
    """Each walks over its own: all trained and all held-out triples are in one of them, once an epoch."""
    run, dataset = tmp_path / "run", toy_dataset(2, typed=True, method="metis")
    settings = (*SETTINGS, "training.edge_chunks=1", "training.batch_size=30", "training.num_epochs=2")
    settings += ("sampling.num_ranges=3", "sampling.buckets=directed", "sampling.bucket_order=affinity")
    settings += ("negatives.local_share=0.5", "negatives.global_share=0.5", "negatives.degree_power=0.5")
    train_on_hosts(tmp_path / "job", dataset, 2, *settings, "checkpoint.every_batches=5", f"output={run}")
    last, num_triples = stats(run)[-1], len(Dataset.open(dataset).split("train"))
    assert last["bytes_sent"] > 0 and np.isfinite(last["epoch_loss"]) and progress(run) == (2, 0)
    for epoch in (0, 1):
        buckets = [line for line in records(run) if line["epoch_idx"] == epoch]
        places = [(line["machine"], line["lhs_partition"], line["rhs_partition"]) for line in buckets]
        assert len(set(places)) == len(places) and {machine for machine, *_ in places} == {0, 1}
        held_out = sum(line["eval_stats_after"]["count"] for line in buckets if "eval_stats_after" in line)
        assert held_out == buckets[-1]["eval_stats_chunk_avg"]["count"] == -(-num_triples // 10)
        assert held_out + sum(line["stats"]["count"] for line in buckets) == num_triples
        assert all(line["seconds"] > 0 for line in buckets)
