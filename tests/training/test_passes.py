"""Records of passes and of buckets, against plain loops: counts, losses, ranks, I/O of the process."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import dglkge
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.distributed.lease import LEASE_FILE, Holder, LeaseTaker, new_nonce
from dglkge.errors import CheckpointError
from dglkge.formats.bigraph_files import read_stats
from dglkge.training.callbacks import Callback
from dglkge.training.statistics.passes import process_usage
from dglkge.typing import Side
from tests.toy_kg import toy_dataset
from tests.training.live import dense_rows, opened, settings, train
from tests.training.test_held_out import logistic_sum, ranked_by_loops
from tests.training.toy_trainer import BATCH_SIZE, NUM_TRIPLES, ToyRun

CHUNKS = "training.edge_chunks=2"
# 23 triples in batches of 5: the last triple of the first chunk, the eleventh, is in the third batch.
FIRST_PASS = 3


class Collected(Callback):
    def __init__(self) -> None:
        self.records: list[tuple[dict, bool]] = []

    def on_pass(self, trainer, record, is_replayed):
        self.records.append((dict(record), is_replayed))


class HeldOut:
    """Counts evaluations; its numbers say what the tables have trained."""

    def __init__(self, run: list[ToyRun]) -> None:
        self.run = run

    def evaluate(self, edge_set, chunk):
        return {"count": 1, "metrics": {"trained": self.run[0].num_trained, "chunk": chunk}}


def lines(folder: Path) -> list[dict]:
    return read_stats(folder / "checkpoint" / "latest")


def places(records: list[dict]) -> list[tuple[int, int, int]]:
    """Epoch, set and chunk of each."""
    return [(record["epoch_idx"], record["edge_path_idx"], record["edge_chunk_idx"]) for record in records]


def loss_of(batches: range) -> float:
    """Mean loss of the toy: each triple's is the number of its batch."""
    sizes = [min(BATCH_SIZE, NUM_TRIPLES - index * BATCH_SIZE) for index in batches]
    return sum(index * size for index, size in zip(batches, sizes)) / sum(sizes)


def test_a_record_of_each_pass(tmp_path):
    run = ToyRun(tmp_path / "run", CHUNKS, "training.num_epochs=2")
    run.train(2)
    run.checkpoints.finish()
    records = lines(tmp_path / "run")
    assert places(records) == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    assert [record["stats"]["count"] for record in records] == [15, 8, 15, 8]
    for number in (0, 2):
        assert records[number]["stats"]["metrics"]["loss"] == pytest.approx(loss_of(range(3)))
        assert records[number + 1]["stats"]["metrics"]["loss"] == pytest.approx(loss_of(range(3, 5)))


@pytest.mark.parametrize("batches, passes", [(1, 0), (3, 1)])
def test_a_version_has_the_passes_that_ended_in_its_epoch(tmp_path, batches, passes):
    settings = (CHUNKS, "training.num_epochs=2", "checkpoint.every_batches=1", "checkpoint.background=false")
    run = ToyRun(tmp_path / "run", *settings)
    run.break_off(batches)
    assert run.checkpoints.latest().progress.get("passes_done", 0) == passes


def test_a_version_after_each_pass(tmp_path):
    run = ToyRun(tmp_path / "run", CHUNKS, "training.num_epochs=2", "checkpoint.every_epochs=0")
    for _ in run.epochs.remaining_until(2):
        for batch in run.trainer.batches():
            run.trainer.step(batch)
            if batch.index == FIRST_PASS:
                assert run.committed() == (0, FIRST_PASS)
                break
        break


def test_batch_statistics_are_means_over_the_triples_of_a_pass(tmp_path):
    run = ToyRun(tmp_path / "run", CHUNKS, "training.num_epochs=2", has_measures=True)
    run.train(2)
    run.checkpoints.finish()
    for record, batches in zip(lines(tmp_path / "run"), [range(3), range(3, 5)] * 2):
        expected = {"loss": loss_of(batches), "reg": 2 * loss_of(batches)}
        expected.update(violators_lhs=0, violators_rhs=3)
        assert record["stats"]["metrics"] == pytest.approx(expected)
    reports = [json.loads(line) for line in (tmp_path / "run" / "stats.jsonl").read_text().splitlines()]
    assert [report["reg"] for report in reports] == [2 * report["loss"] for report in reports]
    assert {(report["violators_lhs"], report["violators_rhs"]) for report in reports} == {(0, 3)}


def test_batch_statistics_that_begin_inside_an_epoch(tmp_path):
    settings = ("training.num_epochs=1", "checkpoint.every_batches=1", "checkpoint.background=false")
    first = ToyRun(tmp_path / "run", *settings)
    first.break_off(FIRST_PASS)
    second = ToyRun(tmp_path / "run", *settings, has_measures=True)
    second.train(1)
    second.checkpoints.finish()
    (record,) = lines(tmp_path / "run")
    metrics = record["stats"]["metrics"]
    assert (metrics["loss"], record["stats"]["count"]) == (pytest.approx(loss_of(range(5))), 23)
    assert (metrics["reg"], metrics["violators_rhs"]) == (pytest.approx(2 * loss_of(range(3, 5))), 3)


@pytest.mark.parametrize(("stop_at", "measured"), [(1, False), (2, True), (3, False), (4, True)])
def test_records_of_a_job_that_was_killed_are_those_of_one_that_was_not(tmp_path, stop_at, measured):
    whole = ToyRun(tmp_path / "whole", CHUNKS, "training.num_epochs=2", has_measures=measured)
    seen = Collected()
    whole.trainer.add_callback(seen)
    whole.train(2)
    whole.checkpoints.finish()
    settings = (CHUNKS, "training.num_epochs=2", "checkpoint.every_batches=1", "checkpoint.background=false")
    first = ToyRun(tmp_path / "run", *settings, has_measures=measured)
    first.break_off(stop_at)
    second, replayed = ToyRun(tmp_path / "run", *settings, has_measures=measured), Collected()
    second.trainer.add_callback(replayed)
    second.train(2)
    second.checkpoints.finish()
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert [record for record, _ in replayed.records] == [record for record, _ in seen.records]
    replays = [is_replayed for _, is_replayed in replayed.records]
    assert replays == [stop_at >= FIRST_PASS, False, False, False]


def test_held_out_triples_are_ranked_before_and_after_each_pass(tmp_path):
    runs: list[ToyRun] = []
    run = ToyRun(tmp_path / "run", CHUNKS, "training.num_epochs=1", held_out=HeldOut(runs))
    runs.append(run)
    run.train(1)
    run.checkpoints.finish()
    metrics = [
        tuple(record[name]["metrics"]["trained"] for name in ("eval_stats_before", "eval_stats_after"))
        for record in lines(tmp_path / "run")
    ]
    assert metrics == [(0, 15), (15, 23)]


def test_a_pass_that_was_interrupted_has_no_numbers_from_before(tmp_path):
    runs: list[ToyRun] = []
    settings = ("training.num_epochs=1", "checkpoint.every_batches=1", "checkpoint.background=false")
    first = ToyRun(tmp_path / "run", *settings, held_out=HeldOut(runs))
    runs.append(first)
    first.break_off(3)
    second = ToyRun(tmp_path / "run", *settings, held_out=HeldOut(runs))
    runs[0] = second
    second.train(1)
    second.checkpoints.finish()
    (record,) = lines(tmp_path / "run")
    assert "eval_stats_before" not in record and record["eval_stats_after"]["metrics"]["trained"] == 23
    assert record["stats"]["count"] == 23


RECORDS = ("metrics.json", "validation.json", "stats.jsonl")


def leased_run(folder: Path) -> ToyRun:
    """Return a toy run whose checkpoints and records have a lease of the folder."""
    lease = LeaseTaker(folder, new_nonce()).take()
    life = ToyRun(folder, "evaluation.valid_every_epochs=1", "checkpoint.every_epochs=0")
    life.checkpoints.storage.lease = life.checkpoints.records.lease = lease
    return life


def rob(folder: Path) -> None:
    other = dataclasses.replace(Holder.this_process(new_nonce(), "", "trainer"), host="elsewhere")
    (folder / LEASE_FILE).write_bytes(other.to_bytes())


def contents(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in RECORDS if (folder / name).exists()}


def test_records_of_the_holder_are_written(tmp_path: Path) -> None:
    life = leased_run(tmp_path)
    life.train(1)
    life.trainer.evaluate("test")
    assert set(contents(tmp_path)) == set(RECORDS)
    assert not list(tmp_path.glob("*.tmp"))
    life.checkpoints.storage.lease.release()


@pytest.mark.parametrize("name", ["metrics", "validation", "stats"])
def test_a_job_that_lost_its_lease_writes_no_record(tmp_path: Path, name: str) -> None:
    life = leased_run(tmp_path)
    life.train(1)
    life.trainer.evaluate("test")
    before = contents(tmp_path)
    rob(tmp_path)
    with pytest.raises(CheckpointError, match="has lost its lease"):
        if name == "metrics":
            life.trainer.evaluate("valid")
        elif name == "validation":
            life.checkpoints.records.write_json("validation.json", {})
        else:
            life.train(2)
    assert contents(tmp_path) == before


def test_unfinished_records_of_killed_jobs_are_removed(tmp_path: Path) -> None:
    life = leased_run(tmp_path)
    leftover = tmp_path / f"metrics.json.{new_nonce()}.tmp"
    leftover.write_text("{")
    (tmp_path / "notes.tmp").write_text("a user's own")
    life.train(1)
    life.trainer.commit()
    assert not leftover.exists() and (tmp_path / "notes.tmp").exists()
    assert os.path.exists(tmp_path / LEASE_FILE)
    life.checkpoints.storage.lease.release()


P, UNIFORM = 3, 7
HELD_OUT = "evaluation.held_out={fraction: 0.2, batch_negatives: 1000, uniform_negatives: 7}"
MODES = ["directed", "mixed"]


def configured(run, mode, *more):
    """Return the configuration of two epochs over ranges."""
    words = [f"sampling.num_ranges={P}", f"sampling.buckets={mode}", "training.num_epochs=2", HELD_OUT]
    words += ["checkpoint.every_epochs=1", "training.batch_size=23", "model.score_function=distmult"]
    words += ["model.reciprocal_relations=false", "loss.name=logistic", "loss.reduction=sum"]
    return load_config(None, settings(toy_dataset(typed=True), run, *words, *more))


def ranges_of(trainer, triples):
    """Return the ranges (n, 2) of heads and tails of original ids: a node's place in its type, times P."""
    layout, relations = trainer._job.layout, trainer._job.dataset.relations.relations
    ranges = []
    for head, relation_id, tail in triples.tolist():
        relation = relations[relation_id]
        ends = ((relation.lhs, head), (relation.rhs, tail))
        places = [(layout.num_nodes(name), int(layout.node_ids(name)[id_])) for name, id_ in ends]
        bounds = [[count * turn // P for turn in range(1, P + 1)] for count, _ in places]
        ranges.append([sum(node >= end for end in of) for of, (_, node) in zip(bounds, places)])
    return np.array(ranges)


def close(got, expected):
    """Compare records, times aside, where sums were added in another order."""
    for record, other in zip(got, expected, strict=True):
        assert record.keys() == other.keys()
        for name in ("lhs_partition", "rhs_partition", "index", "epoch_idx"):
            assert record.get(name) == other.get(name)
        measured = {"stats", "eval_stats_before", "eval_stats_after", "eval_stats_chunk_avg"}
        for name in record.keys() & measured:
            assert record[name]["count"] == other[name]["count"]
            assert record[name]["metrics"] == pytest.approx(other[name]["metrics"], rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_counts_and_losses_are_those_of_the_batches(mode, tmp_path):
    """A batch over several buckets counts for each by its share."""
    sums = defaultdict(lambda: [0.0, 0.0])
    data = Dataset.open(toy_dataset(typed=True)).split("train")
    with opened(configured(tmp_path / "run", mode)) as trainer:
        for epoch in dglkge.remaining_epochs_until(2):
            for batch in trainer.batches():
                loss = trainer.step(batch)
                chunks = np.repeat(*zip(*((group.chunk, group.end - group.start) for group in batch.groups)))
                buckets = [batch.ranges[chunk] for chunk in chunks]
                places = ranges_of(trainer, data[batch.triple_ids])
                for bucket, place in zip(buckets, places.tolist()):
                    # A mixed bucket has both directions, and shares of what is inside of its ranges.
                    assert set(place) <= set(bucket) if mode == "mixed" else tuple(place) == bucket
                    sums[(epoch, *bucket)][0] += 1
                    sums[(epoch, *bucket)][1] += loss / len(batch)
    records = read_stats(tmp_path / "run" / "checkpoint" / "latest")
    assert len(records) == len(sums) == 2 * (P * (P - 1) // 2 if mode == "mixed" else P * P)
    for record in records:
        count, loss = sums[record["epoch_idx"], record["lhs_partition"], record["rhs_partition"]]
        assert record["stats"]["count"] == count
        assert record["stats"]["metrics"]["loss"] == pytest.approx(loss / count, rel=1e-6)
        moved = record["bytes_read"] + record["bytes_written"]
        assert record["seconds"] > 0
        assert record["mb_per_second"] == pytest.approx(moved / 1e6 / record["seconds"], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_held_out_triples_are_ranked_against_rows_of_their_ranges(mode, tmp_path, monkeypatch):
    """The last bucket closes on final rows: its numbers are those of plain loops over these."""
    with opened(configured(tmp_path / "run", mode)) as trainer:
        buckets = trainer._buckets._held_out
        drawn, draw = [], buckets._uniform
        monkeypatch.setattr(
            buckets, "_uniform", lambda *words: drawn.append((words, draw(*words))) or drawn[-1][1]
        )
        held = trainer._job.dataset.split("train")[np.sort(buckets._evaluator.order.held_out(0))]
        last = max(turn for turn, *_ in buckets._walk.batches_of(1))
        seen = [buckets.triples(1, turn) for turn in range(buckets._walk.num_buckets)]
        assert sorted(map(tuple, np.concatenate(seen).tolist())) == sorted(map(tuple, held.tolist()))
        _, ranges = buckets._walk.bucket(1, last)
        train(trainer, 2)
        rows, relations = dense_rows(trainer), trainer._job.dataset.relations.relations
        for (numbers, name, *_), ids in drawn:
            layout, count = trainer._job.layout, trainer._job.layout.num_nodes(name)
            nodes = np.asarray(layout.node_ids(name))[ids.numpy()]
            allowed = [range(count * number // P, count * (number + 1) // P) for number in numbers]
            assert len(ids) == UNIFORM and all(any(node in run for run in allowed) for node in nodes)
            assert len(numbers) == (1 if mode == "directed" else 2)
    triples = seen[last]
    places = ranges_of(trainer, triples)
    assert len(triples) and all(set(place) <= set(ranges) for place in places.tolist())
    pairs = dict.fromkeys((relation.lhs, relation.rhs) for relation in relations)
    calls = iter(drawn[-2 * sum(any(pairs_of(relations, t) == p for t in triples) for p in pairs) :])
    groups = []
    for pair in pairs:
        batch = [triple for triple in triples.tolist() if pairs_of(relations, triple) == pair]
        for side in (Side.TAIL, Side.HEAD) if batch else ():
            (_, name, drawn_side, _), ids = next(calls)
            assert drawn_side is side and name == pair[side is Side.TAIL]
            groups.append((side, batch, ids.tolist()))
    sums = ranked_by_loops(groups, rows, relations, logistic_sum)
    records = read_stats(tmp_path / "run" / "checkpoint" / "latest")
    names = ("lhs_partition", "rhs_partition")
    ranked = [record for record in records if tuple(map(record.get, names)) == ranges][-1]
    assert ranked["eval_stats_after"]["count"] == len(triples)
    for name, value in sums.items():
        assert ranked["eval_stats_after"]["metrics"][name] == pytest.approx(value / len(triples), rel=1e-4), (
            name
        )
    # The average of a pass is that of its triples, before their buckets were trained.
    epoch_records = [record for record in records if record["epoch_idx"] == 1]
    average = epoch_records[-1]["eval_stats_chunk_avg"]
    before = [record["eval_stats_before"] for record in epoch_records if "eval_stats_before" in record]
    total = sum(part["count"] for part in before)
    assert average["count"] == total
    expected = sum(part["count"] * part["metrics"]["loss"] for part in before) / total
    assert average["metrics"]["loss"] == pytest.approx(expected)


class KilledError(Exception):
    """What ends the job."""


def pairs_of(relations, triple):
    """Return the entity types of a triple's head and tail."""
    return relations[triple[1]].lhs, relations[triple[1]].rhs


def test_a_run_that_was_killed_inside_a_bucket_has_the_records_of_one_that_was_not(tmp_path):
    words = ("checkpoint.every_batches=4", "checkpoint.background=false", "training.batch_size=11")
    with opened(configured(tmp_path / "whole", "directed", *words)) as trainer:
        train(trainer, 2)
    with pytest.raises(KilledError), opened(configured(tmp_path / "killed", "directed", *words)) as trainer:
        for epoch in dglkge.remaining_epochs_until(2):
            for batch in trainer.batches():
                if (epoch, batch.index) == (1, 6):
                    raise KilledError
                trainer.step(batch)
    with opened(configured(tmp_path / "killed", "directed", *words)) as trainer:
        assert trainer._position.now == (1, 4)
        train(trainer, 2)
    close(*(read_stats(tmp_path / name / "checkpoint" / "latest") for name in ("killed", "whole")))


def test_usage_is_what_the_kernel_counts(tmp_path):
    """Bytes that are written to a disk are written by this process; a file in memory moves none."""
    before = process_usage()
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(3 << 20))
        os.fsync(file.fileno())
    written = (process_usage() - before)[2]
    assert process_usage(tmp_path / "absent")[1:3].tolist() == [0, 0]
    assert written in (0, pytest.approx(3 << 20, rel=0.1))
