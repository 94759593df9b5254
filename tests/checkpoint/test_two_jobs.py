"""Two jobs on one folder never mix: the one that has lost the lease publishes nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dglkge.checkpoint import CheckpointManager, TrainerGroup, layout, open_checkpoint
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.distributed.lease import LEASE_FILE, Holder, Lease, LeaseTaker, new_nonce
from dglkge.errors import CheckpointError
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


@pytest.mark.parametrize("step", range(1, 9))
def test_the_lease_is_read_before_every_file_takes_its_place(tmp_path, lease, monkeypatch, step):
    """Whenever it is lost: the newest version is whole, and no file of the other job is replaced."""
    manager = manager_of(tmp_path, lease)
    save(manager, 1)
    before, real, calls = contents(tmp_path / "checkpoint"), Lease.check, []

    def check(self):
        calls.append(1)
        if len(calls) == step:
            take_by_another(tmp_path)
        real(self)

    monkeypatch.setattr(Lease, "check", check)
    with pytest.raises(
        CheckpointError, match=r"lost its lease on .*: it is held by trainer \(pid .* on else"
    ):
        save(manager, 2)
    assert contents(tmp_path / "checkpoint") == before or step > 1
    assert open_checkpoint(tmp_path).version == 1
    open_checkpoint(tmp_path).verify()


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
