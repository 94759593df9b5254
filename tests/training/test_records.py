"""Records of a run are written only by the job that holds its lease."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from dglkge.distributed.lease import LEASE_FILE, Holder, LeaseTaker, new_nonce
from dglkge.errors import CheckpointError
from tests.training.toy_trainer import ToyRun

RECORDS = ("metrics.json", "validation.json", "stats.jsonl")


def leased_run(folder: Path) -> ToyRun:
    """Return a toy run whose checkpoints and records have a lease of the folder."""
    lease = LeaseTaker(folder, new_nonce()).take()
    life = ToyRun(folder, "evaluation.valid_every_epochs=1", "checkpoint.every_epochs=0")
    life.checkpoints.storage.lease = life.checkpoints.records.lease = lease
    return life


def rob(folder: Path) -> None:
    """Let another job hold the lease."""
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
