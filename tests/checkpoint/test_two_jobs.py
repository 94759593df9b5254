"""Two jobs on one folder never mix: the one that has lost the lease publishes nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dglkge.checkpoint import CheckpointManager, TrainerGroup, layout, open_checkpoint
from dglkge.checkpoint import part_files as writers
from dglkge.checkpoint.storage import CheckpointStorage, receipt_of
from dglkge.distributed.lease import LEASE_FILE, Holder, Lease, LeaseTaker, new_nonce
from dglkge.errors import CheckpointError, JobError
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import cut, toy_meta, toy_names, toy_tables

META = toy_meta()


@pytest.fixture
def lease(tmp_path: Path):
    taken = LeaseTaker(tmp_path, new_nonce()).take()
    yield taken
    taken.release()


def manager_of(run: Path, lease: Lease | None, num_parts: int | None = None, **group) -> CheckpointManager:
    names = toy_names(META)
    return CheckpointManager(run / "checkpoint", TrainerGroup(**group), names, num_parts, lease=lease)


def save(manager: CheckpointManager, seed: int, num_parts: int = 1) -> int:
    tables = toy_tables(META, seed)
    parts = cut("person", tables["person"], num_parts)[:1]
    return manager.save(parts, cut(RELATION, tables[RELATION], 1)[0], META)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def take_by_another(run: Path) -> None:
    """Let a job on another host have the lease: this one was suspended for too long."""
    other = dataclasses.replace(Holder.this_process(new_nonce(), "", "trainer"), host="elsewhere")
    (run / LEASE_FILE).write_bytes(other.to_bytes())


def test_a_job_that_lost_its_lease_publishes_nothing(tmp_path, lease):
    manager = manager_of(tmp_path, lease)
    save(manager, 1)
    before = contents(tmp_path / "checkpoint")
    take_by_another(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"lost its lease on .*: it is held by trainer \(pid .* on elsewhe"
    ):
        save(manager, 2)
    assert contents(tmp_path / "checkpoint") == before


@pytest.mark.parametrize("step", range(1, 9))
def test_the_lease_is_read_before_every_file_takes_its_place(tmp_path, lease, monkeypatch, step):
    """Whenever it is lost: the newest version is whole, and no file of the other job is replaced."""
    manager = manager_of(tmp_path, lease)
    save(manager, 1)
    real, calls = Lease.check, []

    def check(self):
        calls.append(1)
        if len(calls) == step:
            take_by_another(tmp_path)
        real(self)

    monkeypatch.setattr(Lease, "check", check)
    with pytest.raises(CheckpointError, match="lost its lease"):
        save(manager, 2)
    assert open_checkpoint(tmp_path).version == 1
    open_checkpoint(tmp_path).verify()


def test_receipts_of_another_job_do_not_count(tmp_path, lease):
    """Part 1 of the same version, written by a job that was thought dead."""
    tables = toy_tables(META, 5)
    manager = manager_of(tmp_path, lease, num_parts=2, limit_seconds=0.2)
    other = CheckpointStorage(tmp_path / "checkpoint").folder(1)
    real = writers.write_relations

    def write(*arguments):
        part = cut("person", tables["person"], 2)[1]
        entry = writers.write_part(other, 1, part, META, arguments[-1])
        other.write_text(layout.receipt_file(entry.name), receipt_of(entry, ""))
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writers, "write_relations", write)
        with pytest.raises(JobError, match="embeddings_person_1.v1.h5.receipt.json is missing: no"):
            save(manager, 1, num_parts=2)
    assert manager.latest() is None


def test_temporary_files_have_the_jobs_name_and_those_of_dead_jobs_go(tmp_path, lease):
    folder = tmp_path / "checkpoint"
    storage = CheckpointStorage(folder, lease)
    storage.prepare()
    with storage.new_file("model.v1.h5") as path:
        path.write_text("x")
        assert path.name == f"model.v1.h5.{lease.nonce}.tmp"
        assert layout.is_temporary_of_a_job(path.name)
    abandoned = [
        f"{name}.{new_nonce()}.tmp" for name in ("model.v2.h5", "config.json", "entity_names_a_0.json")
    ]
    for name in abandoned:
        (folder / name).touch()
    (folder / "mine.tmp").touch()
    save(manager_of(tmp_path, lease), 1)
    names = {path.name for path in folder.iterdir()}
    assert not names & set(abandoned) and "mine.tmp" in names
