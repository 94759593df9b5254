"""Passes of an epoch and their records."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from dglkge.checkpoint.bigraph import read_stats
from dglkge.distributed.lease import LEASE_FILE, Holder, LeaseTaker, new_nonce
from dglkge.errors import CheckpointError
from dglkge.training.callbacks import Callback
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
    return [(one["epoch_idx"], one["edge_path_idx"], one["edge_chunk_idx"]) for one in records]


def loss_of(batches: range) -> float:
    """Mean loss of the toy: each triple's is the number of its batch."""
    sizes = [min(BATCH_SIZE, NUM_TRIPLES - index * BATCH_SIZE) for index in batches]
    return sum(index * size for index, size in zip(batches, sizes)) / sum(sizes)


def test_a_record_of_each_pass(tmp_path):
    run = ToyRun(tmp_path / "run", CHUNKS, "training.num_epochs=2")
    run.train(2)
    run.checkpoints.finish()
    found = lines(tmp_path / "run")
    assert places(found) == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    assert [one["index"] for one in found] == [0, 1, 2, 3]
    assert [one["stats"]["count"] for one in found] == [15, 8, 15, 8]
    for number in (0, 2):
        assert found[number]["stats"]["metrics"]["loss"] == pytest.approx(loss_of(range(3)))
        assert found[number + 1]["stats"]["metrics"]["loss"] == pytest.approx(loss_of(range(3, 5)))


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
    assert [one["reg"] for one in reports] == [2 * one["loss"] for one in reports]
    assert {(one["violators_lhs"], one["violators_rhs"]) for one in reports} == {(0, 3)}


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
    assert [one for _, one in replayed.records] == [stop_at >= FIRST_PASS, False, False, False]


def test_held_out_triples_are_ranked_before_and_after_each_pass(tmp_path):
    runs: list[ToyRun] = []
    run = ToyRun(tmp_path / "run", CHUNKS, "training.num_epochs=1", held_out=HeldOut(runs))
    runs.append(run)
    run.train(1)
    run.checkpoints.finish()
    metrics = [
        tuple(one[name]["metrics"]["trained"] for name in ("eval_stats_before", "eval_stats_after"))
        for one in lines(tmp_path / "run")
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


@pytest.mark.parametrize("what", ["metrics", "validation", "stats"])
def test_a_job_that_lost_its_lease_writes_no_record(tmp_path: Path, what: str) -> None:
    life = leased_run(tmp_path)
    life.train(1)
    life.trainer.evaluate("test")
    before = contents(tmp_path)
    rob(tmp_path)
    with pytest.raises(CheckpointError, match="has lost its lease"):
        if what == "metrics":
            life.trainer.evaluate("valid")
        elif what == "validation":
            life.checkpoints.records.write_json("validation.json", {})
        else:
            life.train(2)
    assert contents(tmp_path) == before


def test_unfinished_records_of_killed_jobs_are_removed(tmp_path: Path) -> None:
    life = leased_run(tmp_path)
    left = tmp_path / f"metrics.json.{new_nonce()}.tmp"
    left.write_text("{")
    (tmp_path / "notes.tmp").write_text("a user's own")
    life.train(1)
    life.trainer.commit()
    assert not left.exists() and (tmp_path / "notes.tmp").exists()
    assert os.path.exists(tmp_path / LEASE_FILE)
    life.checkpoints.storage.lease.release()
