"""Records of passes and of buckets, against plain loops: counts, losses, ranks, I/O of the process."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.distributed.lease import LEASE_FILE, Holder, LeaseTaker, new_nonce
from dglkge.errors import CheckpointError
from dglkge.formats.bigraph_files import read_stats
from dglkge.training.callbacks import Callback
from dglkge.training.statistics.passes import process_usage
from dglkge.typing import Side
from tests.toy_kg import toy_dataset
from tests.training.live import batches_of, chunks_of, opened, settings, stats_lines, train
from tests.training.test_held_out import by_loops, logistic_sum
from tests.training.toy_trainer import EVERY_BATCH, ToyRun

CHUNKS = ("training.edge_chunks=2", "training.num_epochs=2")
# 23 triples in batches of 5: the last triple of the first chunk, the eleventh, is in the third batch.
FIRST_PASS = 3


class Collected(Callback):
    def __init__(self) -> None:
        self.records: list[dict] = []
        self.replays: list[bool] = []

    def on_pass(self, trainer, record, is_replayed):
        self.records.append(dict(record))
        self.replays.append(is_replayed)


class HeldOut:
    """Ranks nothing; its numbers say what the tables of ``run`` have trained."""

    run: ToyRun

    def evaluate(self, edge_set, chunk):
        return {"count": 1, "metrics": {"trained": self.run.num_trained, "chunk": chunk}}


def saved_records(folder: Path) -> list[dict]:
    return read_stats(folder / "checkpoint" / "latest")


def loss_of(batches: range) -> float:
    """Mean loss of the toy: each triple's is the number of its batch."""
    return float(np.average(batches, weights=[3 if index == 4 else 5 for index in batches]))


@pytest.mark.parametrize("measured", [False, True])
def test_each_pass_has_a_record_with_means_over_its_triples(tmp_path, measured):
    run = ToyRun(tmp_path, *CHUNKS, has_measures=measured)
    run.train(2)
    run.checkpoints.finish()
    records = saved_records(tmp_path)
    places = [[record[f"{name}_idx"] for name in ("epoch", "edge_path", "edge_chunk")] for record in records]
    assert places == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    assert [record["stats"]["count"] for record in records] == [15, 8, 15, 8]
    for record, batches in zip(records, [range(3), range(3, 5)] * 2):
        expected = {"loss": loss_of(batches)}
        if measured:
            expected.update(reg=2 * loss_of(batches), violators_lhs=0, violators_rhs=3)
        assert record["stats"]["metrics"] == pytest.approx(expected)
    for report in stats_lines(tmp_path):
        assert report.get("reg") == (2 * report["loss"] if measured else None)
        violators = (report.get("violators_lhs"), report.get("violators_rhs"))
        assert violators == ((0, 3) if measured else (None, None))


def test_a_version_is_written_after_each_pass_and_has_those_of_its_epoch(tmp_path):
    run = ToyRun(tmp_path / "every batch", *CHUNKS, *EVERY_BATCH)
    passes_done = []
    after = {(0, n): lambda: passes_done.append(run.checkpoints.latest().progress) for n in range(1, 5)}
    run.train(1, after)
    assert [progress.get("passes_done", 0) for progress in passes_done] == [0, 0, 1, 1]
    assert [progress["batches_done"] for progress in passes_done] == [1, 2, 3, 4]
    run, committed = ToyRun(tmp_path / "passes", *CHUNKS, "checkpoint.every_epochs=0"), []
    run.train(1, {(0, FIRST_PASS): lambda: committed.append(run.committed())})
    assert committed == [(0, FIRST_PASS)]


@pytest.mark.parametrize(("stop_at", "measured"), [(1, False), (2, True), (3, False), (4, True)])
def test_records_of_a_job_that_was_killed_are_those_of_one_that_was_not(tmp_path, stop_at, measured):
    seen, replayed = Collected(), Collected()
    whole = ToyRun(tmp_path / "whole", *CHUNKS, has_measures=measured)
    for stop in (1, stop_at):
        ToyRun(tmp_path / "run", *CHUNKS, *EVERY_BATCH, has_measures=measured).break_off(stop)
    last = ToyRun(tmp_path / "run", *CHUNKS, *EVERY_BATCH, has_measures=measured)
    for run, callback in ((whole, seen), (last, replayed)):
        run.trainer.add_callback(callback)
        run.train(2)
        run.checkpoints.finish()
    assert saved_records(tmp_path / "run") == saved_records(tmp_path / "whole")
    losses = [stats_lines(tmp_path / name)[-1]["epoch_loss"] for name in ("run", "whole")]
    assert losses == [pytest.approx(loss_of(range(5)))] * 2
    assert replayed.records == seen.records
    assert replayed.replays == [stop_at >= FIRST_PASS, False, False, False]


@pytest.mark.parametrize("stop_at", [0, 3])
def test_held_out_triples_are_ranked_before_and_after_each_pass(tmp_path, stop_at):
    """A pass that was interrupted has no numbers from before."""
    held_out, settings = HeldOut(), ("training.num_epochs=1", *EVERY_BATCH)
    settings += () if stop_at else ("training.edge_chunks=2",)
    if stop_at:
        held_out.run = ToyRun(tmp_path, *settings, held_out=held_out)
        held_out.run.break_off(stop_at)
    held_out.run = ToyRun(tmp_path, *settings, held_out=held_out)
    held_out.run.train(1)
    held_out.run.checkpoints.finish()
    names, records = ("eval_stats_before", "eval_stats_after"), saved_records(tmp_path)
    ranked = [[record[name] for name in names if name in record] for record in records]
    trained = [[stats["metrics"]["trained"] for stats in pair] for pair in ranked]
    assert trained == ([[23]] if stop_at else [[0, 15], [15, 23]])


RECORDS = {"metrics.json", "validation.json", "stats.jsonl"}


@pytest.fixture
def leased(tmp_path: Path) -> ToyRun:
    """A toy run whose checkpoints and records have a lease of the folder; one epoch is trained."""
    lease = LeaseTaker(tmp_path, new_nonce()).take()
    life = ToyRun(tmp_path, "evaluation.valid_every_epochs=1", "checkpoint.every_epochs=0")
    life.checkpoints.storage.lease = life.checkpoints.records.lease = lease
    life.train(1)
    return life


def test_a_job_that_lost_its_lease_writes_no_record(tmp_path: Path, leased: ToyRun) -> None:
    def contents() -> dict[str, str]:
        return {path.name: path.read_text() for path in tmp_path.iterdir() if path.name in RECORDS}

    leased.trainer.evaluate("test")
    before = contents()
    assert before.keys() == RECORDS and not list(tmp_path.glob("*.tmp"))
    other = dataclasses.replace(Holder.this_process(new_nonce(), "", "trainer"), host="elsewhere")
    (tmp_path / LEASE_FILE).write_bytes(other.to_bytes())
    for write in (
        lambda: leased.trainer.evaluate("valid"),
        lambda: leased.checkpoints.records.write_json("validation.json", {}),
        lambda: leased.train(2),
    ):
        with pytest.raises(CheckpointError, match="has lost its lease"):
            write()
    assert contents() == before


def test_unfinished_records_of_killed_jobs_are_removed(tmp_path: Path, leased: ToyRun) -> None:
    leftover = tmp_path / f"metrics.json.{new_nonce()}.tmp"
    leftover.write_text("{")
    (tmp_path / "notes.tmp").write_text("a user's own")
    leased.trainer.commit()
    assert not leftover.exists() and (tmp_path / "notes.tmp").exists()
    assert (tmp_path / LEASE_FILE).exists()
    leased.checkpoints.storage.lease.release()


P, UNIFORM = 3, 7
HELD_OUT = "evaluation.held_out={fraction: 0.2, batch_negatives: 1000, uniform_negatives: 7}"
MODES = ["directed", "mixed"]
MEASURED = {"stats", "eval_stats_before", "eval_stats_after", "eval_stats_chunk_avg"}


def configured(run, mode, *more):
    words = [f"sampling.num_ranges={P}", f"sampling.buckets={mode}", "training.num_epochs=2", HELD_OUT]
    words += ["checkpoint.every_epochs=1", "training.batch_size=23", "model.score_function=distmult"]
    words += ["model.reciprocal_relations=false", "loss.name=logistic", "loss.reduction=sum"]
    return load_config(None, settings(toy_dataset(typed=True), run, *words, *more))


def ranges_of(trainer, triples):
    """Return the ranges of heads and tails of original ids: a node's place in its type, times P."""
    layout, relations = trainer._job.layout, trainer._job.dataset.relations.relations

    def range_of(name, id_):
        ends = [layout.num_nodes(name) * turn // P for turn in range(1, P + 1)]
        return int(np.searchsorted(ends, layout.node_ids(name)[id_], side="right"))

    return [(range_of(relations[r].lhs, h), range_of(relations[r].rhs, t)) for h, r, t in triples.tolist()]


@pytest.mark.parametrize("mode", MODES)
def test_counts_and_losses_are_those_of_the_batches(mode, tmp_path):
    """A batch over several buckets counts for each by its share."""
    sums = defaultdict(lambda: np.zeros(2))
    data = Dataset.open(toy_dataset(typed=True)).split("train")
    with opened(configured(tmp_path / "run", mode)) as trainer:
        for epoch, batch in batches_of(trainer, 2):
            loss = trainer.step(batch)
            buckets = [batch.ranges[chunk] for chunk in chunks_of(batch)]
            for bucket, place in zip(buckets, ranges_of(trainer, data[batch.triple_ids])):
                # A mixed bucket has both directions, and shares of what is inside of its ranges.
                assert set(place) <= set(bucket) if mode == "mixed" else place == bucket
                sums[(epoch, *bucket)] += (1, loss / len(batch))
    records = saved_records(tmp_path / "run")
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
    drawn = {}

    def noted(name, side, key):
        drawn[name, side, key] = draw(name, side, key)
        numbers = {*key[1:3]} if mode == "mixed" else {key[1 + (side is Side.TAIL)]}
        count, nodes = layout.num_nodes(name), layout.node_ids(name)[drawn[name, side, key]]
        allowed = [range(count * number // P, count * (number + 1) // P) for number in numbers]
        assert len(nodes) == UNIFORM and all(any(node in run for run in allowed) for node in nodes)
        assert len(numbers) == (1 if mode == "directed" else 2)
        return drawn[name, side, key]

    def drawn_of(name, side, place):
        return drawn[name, side, (0, *ranges, place)]

    with opened(configured(tmp_path / "run", mode)) as trainer:
        buckets, layout = trainer._buckets._held_out, trainer._job.layout
        draw, walk = buckets.uniform, buckets._walk
        monkeypatch.setattr(buckets, "uniform", noted)
        held = trainer._job.dataset.split("train")[np.sort(buckets.order.held_out(0))]
        seen = [buckets.triples(1, turn) for turn in range(walk.num_buckets)]
        assert sorted(map(tuple, np.concatenate(seen).tolist())) == sorted(map(tuple, held.tolist()))
        last = max(turn for turn, *_ in walk.batches_of(1))
        triples, (_, ranges) = seen[last], walk.bucket(1, last)
        assert len(triples) and all(set(place) <= set(ranges) for place in ranges_of(trainer, triples))
        train(trainer, 2)
        expected = by_loops(trainer, triples, 1000, drawn_of, logistic_sum)
    records = [record for record in saved_records(tmp_path / "run") if record["epoch_idx"] == 1]
    (ranked,) = [record for record in records if (record["lhs_partition"], record["rhs_partition"]) == ranges]
    assert ranked["eval_stats_after"]["count"] == len(triples)
    assert ranked["eval_stats_after"]["metrics"] == pytest.approx(expected, rel=1e-4)
    # The average of a pass is that of its triples, before their buckets were trained.
    average = records[-1]["eval_stats_chunk_avg"]
    before = [record["eval_stats_before"] for record in records if "eval_stats_before" in record]
    counts = [part["count"] for part in before]
    assert average["count"] == sum(counts)
    losses = [part["metrics"]["loss"] for part in before]
    assert average["metrics"]["loss"] == pytest.approx(np.average(losses, weights=counts))


def test_a_run_that_was_killed_inside_a_bucket_has_the_records_of_one_that_was_not(tmp_path):
    words = ("checkpoint.every_batches=4", "checkpoint.background=false", "training.batch_size=11")
    whole, killed = (configured(tmp_path / name, "directed", *words) for name in ("whole", "killed"))
    with opened(whole) as trainer:
        train(trainer, 2)
    with pytest.raises(RuntimeError, match="killed"), opened(killed) as trainer:
        for epoch, batch in batches_of(trainer, 2):
            if (epoch, batch.index) == (1, 6):
                raise RuntimeError("killed")
            trainer.step(batch)
    with opened(killed) as trainer:
        assert trainer._position.now == (1, 4)
        train(trainer, 2)
    records, expected_records = (saved_records(tmp_path / name) for name in ("killed", "whole"))
    for record, expected in zip(records, expected_records, strict=True):
        assert record.keys() == expected.keys()
        for name in ("lhs_partition", "rhs_partition", "index", "epoch_idx"):
            assert record.get(name) == expected.get(name)
        for name in record.keys() & MEASURED:
            assert record[name]["count"] == expected[name]["count"]
            # Sums were added in another order.
            assert record[name]["metrics"] == pytest.approx(expected[name]["metrics"], rel=1e-5)


def test_usage_is_what_the_kernel_counts(tmp_path):
    """Bytes that are written to a disk are written by this process; a file in memory moves none."""
    before = process_usage()
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(3 << 20))
        os.fsync(file.fileno())
    written = (process_usage() - before)[2]
    assert process_usage(tmp_path / "absent")[1:3].tolist() == [0, 0]
    assert written in (0, pytest.approx(3 << 20, rel=0.1))
