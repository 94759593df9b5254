"""Jobs with a copy at a URL, chunks and held-out triples: going on elsewhere gives the same tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dglkge.checkpoint import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.partition.extend import extend_dataset
from dglkge.training.statistics.passes import USAGE
from tests.functional.job import dglkge, train, train_alone
from tests.functional.results import records
from tests.functional.simulated_hosts import train_on_hosts
from tests.toy_kg import toy_dataset

SETTINGS = (
    *("model.dimension=8", "training.batch_size=40", "negatives.chunk_size=10", "negatives.num_uniform=10"),
    *("training.matmul_dtype=float32", "training.edge_chunks=2", "evaluation.held_out.fraction=0.1"),
    "evaluation.held_out.uniform_negatives=20",
)
PLACE = ("epoch_idx", "edge_path_idx", "edge_chunk_idx")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Three epochs in one process, without a copy."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train_alone(*SETTINGS, f"dataset={toy_dataset()}", f"output={folder}", "training.num_epochs=3")
    return folder


def test_a_run_goes_on_from_its_copy(alone, tmp_path):
    url = f"file://{tmp_path}/bucket/run"
    common = (*SETTINGS, f"dataset={toy_dataset()}", f"checkpoint.storage={url}")
    train_alone(*common, f"output={tmp_path / 'a'}", "training.num_epochs=1")
    second = train_alone(*common, f"output={tmp_path / 'b'}", "training.num_epochs=3")
    assert "resumed: 1 epochs" in second.stderr
    checkpoint, other = open_checkpoint(alone), open_checkpoint(tmp_path / "b", verify=True)
    for table in ("entity", "relation"):
        assert torch.equal(checkpoint[table][:], other[table][:])
    assert records(tmp_path / "b") == records(alone)
    assert torch.equal(
        open_checkpoint(tmp_path / "bucket" / "run", verify=True)["entity"][:], checkpoint["entity"][:]
    )
    # The metrics of the end, written after the last version, are there too.
    for name in ("metrics.json", "stats.jsonl"):
        assert (tmp_path / "bucket" / "run" / name).read_text() == (tmp_path / "b" / name).read_text()


def test_held_out_triples_are_never_trained(alone):
    passes = records(alone)
    assert [(record["epoch_idx"], record["edge_chunk_idx"]) for record in passes] == [
        (e, c) for e in range(3) for c in (0, 1)
    ]
    num_triples = len(Dataset.open(toy_dataset()).split("train"))
    for first, second in zip(passes[::2], passes[1::2]):
        held = first["eval_stats_before"]["count"] + second["eval_stats_before"]["count"]
        trained = first["stats"]["count"] + second["stats"]["count"]
        assert held + trained == num_triples and held == -(-num_triples // 10)
    # The numbers after a pass are those before the same triples' next pass, but for what the other trained.
    assert passes[0]["eval_stats_after"] != passes[0]["eval_stats_before"]


def test_two_trainers_have_the_same_records(alone, tmp_path):
    url = f"file://{tmp_path}/bucket/run"
    train(
        tmp_path, 2, *SETTINGS, f"dataset={toy_dataset()}", f"output={tmp_path / 'run'}",
        "training.num_epochs=3", f"checkpoint.storage={url}",
    )  # fmt: skip
    for record, other in zip(records(alone), records(tmp_path / "run")):
        assert record["stats"]["count"] == other["stats"]["count"]
        for name in ("eval_stats_before", "eval_stats_after"):
            for metric, value in record[name]["metrics"].items():
                assert other[name]["metrics"][metric] == pytest.approx(value, rel=0.02, abs=0.02), metric
    report = dglkge("inspect", url, "--json")
    assert json.loads(report.stdout)["version"] == 6


def test_two_hosts_walk_over_the_same_sets(tmp_path):
    """Sets, chunks, held-out and touched rows belong to triples, not to machines."""
    source = tmp_path / "more.tsv"
    rows = [f"e{i:03d}\tturn_1\te{900 + i % 3}\n" for i in range(30)]
    source.write_text("".join([*rows, "e900\tspin\te007\n"]))
    for parts in (1, 2):
        extend_dataset(toy_dataset(parts), [source], tmp_path / f"data{parts}", "more")
    settings = (*SETTINGS, "training.edge_sets=[more, train]", "training.num_epochs=2")
    settings += ("sampling.order=global", f"checkpoint.storage=file://{tmp_path}/bucket/run")
    train_on_hosts(tmp_path / "job", tmp_path / "data2", 1, *settings, f"output={tmp_path / 'hosts'}")
    alone = (*settings[:-1], f"dataset={tmp_path / 'data1'}", f"output={tmp_path / 'alone'}")
    train_alone(*alone)
    checkpoint, other = (
        open_checkpoint(tmp_path / "alone"),
        open_checkpoint(tmp_path / "bucket" / "run", verify=True),
    )
    for table in ("entity", "relation"):
        assert torch.allclose(checkpoint[table][:], other[table][:], atol=1e-5)
    for first, second in zip(records(tmp_path / "alone"), records(tmp_path / "hosts")):
        assert [first[name] for name in PLACE] == [second[name] for name in PLACE]
        assert first["stats"]["count"] == second["stats"]["count"]
        assert first.keys() == second.keys()
        # A pass without a batch of its own, as the second chunk of the small set, has no numbers from before.
        for name in first.keys() & {"eval_stats_before", "eval_stats_after"}:
            assert first[name]["count"] == second[name]["count"]
            for metric, value in first[name]["metrics"].items():
                assert second[name]["metrics"][metric] == pytest.approx(value, rel=0.02, abs=0.02), metric
    assert [tuple(record[name] for name in PLACE) for record in records(tmp_path / "hosts")] == [
        (epoch, edge_set, chunk) for epoch in (0, 1) for edge_set in (0, 1) for chunk in (0, 1)
    ]


def test_sets_are_walked_in_bucket_order(tmp_path):
    """A run that ends after an epoch and goes on has the tables and records of one that did not end."""
    source, data = tmp_path / "more.tsv", tmp_path / "data"
    source.write_text("".join(f"e{i:03d}\tturn_1\te{i + 20:03d}\n" for i in range(30)))
    extend_dataset(toy_dataset(), [source], data, "more")
    settings = (*SETTINGS, f"dataset={data}", "training.edge_sets=[more, train]", "training.batch_size=10")
    settings += ("sampling.num_ranges=3",)
    for name, epochs in (("whole", (2,)), ("resumed", (1, 2))):
        for number in epochs:
            train_alone(*settings, f"output={tmp_path / name}", f"training.num_epochs={number}")
    whole, resumed = (open_checkpoint(tmp_path / name) for name in ("whole", "resumed"))
    for table in ("entity", "relation"):
        assert torch.equal(whole[table][:], resumed[table][:])
    buckets, usage = records(tmp_path / "whole"), ("seconds", "mb_per_second", *USAGE)
    assert all(record.keys() >= {"stats", *usage} for record in buckets)
    without = [
        [{k: v for k, v in record.items() if k not in usage} for record in records(tmp_path / name)]
        for name in ("whole", "resumed")
    ]
    assert without[0] == without[1]
    places = [tuple(record[name] for name in PLACE) for record in buckets]
    passes = [(epoch, edge_set, chunk) for epoch in (0, 1) for edge_set in (0, 1) for chunk in (0, 1)]
    assert list(dict.fromkeys(places)) == passes
    # Three mixed buckets of each set.
    numbers = [record["index"] for record in buckets]
    assert numbers == sorted(set(numbers)) and [passes[number // 3] for number in numbers] == places
    num_triples = len(Dataset.open(data).split("train"))
    for epoch in (0, 1):
        passes = [record for record in buckets if record["epoch_idx"] == epoch]
        held_out = sum(
            record["eval_stats_after"]["count"] for record in passes if "eval_stats_after" in record
        )
        assert held_out == 3 + -(-(num_triples - 30) // 10)
        assert held_out + sum(record["stats"]["count"] for record in passes) == num_triples
    # One of the sets, and all triples: each has buckets of its own.
    for name, sets, expected in (("old", "[train]", num_triples - 30), ("all", "[]", num_triples)):
        words = (*settings, f"training.edge_sets={sets}", "evaluation.held_out=")
        train_alone(*words, f"output={tmp_path / name}", "training.num_epochs=1")
        assert sum(record["stats"]["count"] for record in records(tmp_path / name)) == expected
    with (tmp_path / "all" / "stats.jsonl").open() as lines:
        shown = [record["bucket_record"] for record in map(json.loads, lines) if "bucket_record" in record]
    assert shown == records(tmp_path / "all")


def test_two_machines_have_buckets_of_their_own(tmp_path):
    """Each walks over its own: all trained and all held-out triples are in one of them, once an epoch."""
    settings = (*SETTINGS, "training.edge_chunks=1", "training.batch_size=30", "training.num_epochs=2")
    settings += ("sampling.num_ranges=3", "sampling.buckets=directed", "checkpoint.every_batches=5")
    train_on_hosts(tmp_path / "job", toy_dataset(2), 2, *settings, f"output={tmp_path / 'run'}")
    lines, num_triples = records(tmp_path / "run"), len(Dataset.open(toy_dataset(2)).split("train"))
    for epoch in (0, 1):
        buckets = [line for line in lines if line["epoch_idx"] == epoch]
        places = [(line["machine"], line["lhs_partition"], line["rhs_partition"]) for line in buckets]
        assert len(set(places)) == len(places) and {machine for machine, *_ in places} == {0, 1}
        held_out = sum(line["eval_stats_after"]["count"] for line in buckets if "eval_stats_after" in line)
        assert held_out == buckets[-1]["eval_stats_chunk_avg"]["count"] == -(-num_triples // 10)
        assert held_out + sum(line["stats"]["count"] for line in buckets) == num_triples
        assert all(line["seconds"] > 0 for line in buckets)


@pytest.mark.parametrize(
    "setting, text",
    [
        ("checkpoint.storage=s4://line/run", "checkpoint.storage: unknown scheme of a URL 's4'; known:"),
        ("output=s3://line/run", "checkpoint.storage takes the URL"),
        ("training.edge_sets=[trian]", "unknown edge set 'trian'; did you mean 'train'"),
    ],
)
def test_refusals_are_one_line(tmp_path, setting, text):
    done = train_alone(*SETTINGS, f"dataset={toy_dataset()}", f"output={tmp_path / 'run'}", setting, status=2)
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert text in line
