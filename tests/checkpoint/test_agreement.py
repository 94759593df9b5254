"""All trainers go on from the same version, or all end with the same error: none waits for another."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dglkge.checkpoint import CheckpointManager, TrainerGroup, open_checkpoint
from dglkge.checkpoint import manager as managers
from dglkge.checkpoint.manifest import FileEntry, Manifest
from dglkge.checkpoint.mirror import Mirror
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.checkpoint.stores import FileStore, open_store
from dglkge.distributed.process_group import agree
from dglkge.errors import CheckpointError, JobError, StorageError
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import (
    blank,
    cut,
    flip,
    in_threads,
    same,
    save_alone,
    toy_meta,
    toy_names,
    toy_tables,
)

META = toy_meta()
LIMIT_SECONDS = 60


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managers, "AGREEMENT_SECONDS", 1.0)
    monkeypatch.setattr(managers, "AGREEMENT_POLL_SECONDS", 0.05)


class Gathering:
    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=LIMIT_SECONDS)
        self.texts = [""] * num_ranks

    def of(self, rank: int) -> Callable[[str], Sequence[str]]:
        def gather(text: str) -> list[str]:
            self.texts[rank] = text
            self.barrier.wait()
            texts = list(self.texts)
            self.barrier.wait()
            return texts

        return gather


def together(disks: Sequence[Path], work: Callable[[CheckpointManager], object]) -> list[str]:
    """Do some work as the leader of each machine; return the error of each, or what it returned as text."""
    gathering = Gathering(len(disks))
    outcomes = [""] * len(disks)

    def leader(rank: int) -> None:
        group = TrainerGroup(rank, True, gathering.barrier.wait, gathering.of(rank))
        manager = CheckpointManager(disks[rank], group, toy_names(META))
        try:
            outcomes[rank] = str(work(manager))
        except StorageError as error:
            outcomes[rank] = f"StorageError: {error}"
        except (CheckpointError, JobError) as error:
            outcomes[rank] = f"error: {error}"

    in_threads(len(disks), leader)
    return outcomes


def save(disk: Path, seed: int, keep: str = "") -> None:
    save_alone(disk, META, toy_tables(META, seed), *([keep] if keep else []))


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    """The copies of two machines: version 1, which is kept, and version 2."""
    first, second = tmp_path / "0" / "checkpoint", tmp_path / "1" / "checkpoint"
    save(first, 1, "epoch_1")
    save(first, 2)
    second.parent.mkdir()
    shutil.copytree(first, second, symlinks=True)
    return [first, second]


def resume(manager: CheckpointManager) -> str:
    meta = manager.latest()
    if meta is None:
        return "starts anew"
    tables = toy_tables(META, 9)
    parts = [blank(cut("person", tables["person"], 1)[0])]
    agree(manager.group.gather, lambda: manager.restore(parts))
    return f"resumed from {manager.storage.published_version()}"


def test_a_copy_that_others_lack_ends_all(disks):
    """Rank 0 would start anew, and rank 1 restore: each would wait for the other for ever."""
    shutil.rmtree(disks[0])
    outcomes = together(disks, resume)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].startswith(
        f"error: the trainers do not find the same checkpoint: rank 0 has none in {disks[0]} on "
    )
    assert f"rank 1 has version 2 (manifest {CheckpointStorage(disks[1]).stored(2).checksum})" in outcomes[0]
    assert "\n" not in outcomes[0]


def test_versions_of_equal_number_and_other_content_end_all(disks):
    shutil.rmtree(disks[1])
    save(disks[1], 7)
    save(disks[1], 8)
    outcomes = together(disks, resume)
    assert outcomes[0] == outcomes[1] and "do not find the same checkpoint" in outcomes[0]


def test_damage_on_one_disk_ends_all(disks):
    os.truncate(disks[1] / "v2" / "embeddings_person_0.v2.h5", 100)
    outcomes = together(disks, resume)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].startswith("error: rank 1: ") and "embeddings_person_0.v2.h5 is damaged" in outcomes[0]


def test_a_fallback_that_fails_on_rank_0_ends_all(tmp_path):
    """On one disk that all see; the others waited at a barrier."""
    save(tmp_path, 1)
    flip(tmp_path / "v1" / "embeddings_person_0.v1.h5", 2500)
    outcomes = together([tmp_path, tmp_path], lambda manager: manager.fall_back())
    assert outcomes[0] == outcomes[1] and "its checksum is not the one in the manifest" in outcomes[0]


def test_a_disk_on_which_a_fallback_can_move_nothing_ends_all(disks, monkeypatch):
    flip(disks[0] / "v2" / "embeddings_person_0.v2.h5", 2500)
    real = os.replace

    def failing(source, target):
        if "damaged_v2" in str(target) and str(target).startswith(str(disks[0])):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    outcomes = together([disks[0], disks[0]], lambda manager: manager.fall_back())
    assert outcomes == [f"StorageError: cannot write to {disks[0]}: Input/output error"] * 2


def test_waits_in_a_fallback_allow_for_all_that_is_read(disks):
    """A barrier of fixed length ended the others while one trainer read every version on a slow disk."""
    for disk in disks:
        flip(disk / "v2" / "embeddings_person_0.v2.h5", 2500)
    largest = max(sum(path.stat().st_size for path in disk.glob("v*/*")) for disk in disks)
    waits: list[tuple[int, int]] = []

    def work(manager):
        manager.fall_back(lambda num_bytes: waits.append((manager.group.rank, num_bytes)))

    together(disks, work)
    assert sorted(waits) == [(rank, 2 * largest) for rank in (0, 1)]


def start_saving(manager: CheckpointManager) -> int:
    """Write the next version as one of two machines."""
    tables = toy_tables(META, 4)
    parts = [cut("person", tables["person"], 2)[manager.group.rank]]
    manager.num_parts = 2
    return manager.save(
        parts, cut(RELATION, tables[RELATION], 1)[0] if manager.group.rank == 0 else None, META
    )


def test_trainers_that_see_different_versions_do_not_save(disks):
    """Two folders that should be one: a disk that is not mounted on one machine."""
    save(disks[0], 3)
    outcomes = together(disks, start_saving)
    assert outcomes[0] == outcomes[1] and "do not find the same checkpoint" in outcomes[0]
    assert [open_checkpoint(disk).version for disk in disks] == [3, 2]


@pytest.mark.parametrize("work_of_all, outcome", [("save", "3"), ("resume", "resumed from 2")])
def test_a_host_that_sees_a_version_late_is_waited_for(disks, monkeypatch, work_of_all, outcome):
    """What a shared disk shows of another host's files may be some seconds old."""
    monkeypatch.setattr(managers, "AGREEMENT_SECONDS", float(LIMIT_SECONDS))
    real, calls = CheckpointStorage.published, []

    def late(storage, texts=True):
        if threading.current_thread() in seen_late and len(calls) < 3:
            calls.append(1)
            return None
        return real(storage, texts=texts)

    seen_late: list[threading.Thread] = []

    def work(manager):
        if manager.group.rank == 1:
            seen_late.append(threading.current_thread())
        return start_saving(manager) if work_of_all == "save" else resume(manager)

    monkeypatch.setattr(CheckpointStorage, "published", late)
    assert together([disks[0], disks[0]], work) == [outcome] * 2
    assert len(calls) == 3


class SlowMirror(Mirror):
    """Uploads for longer than the limit, in blocks or without a sign of progress."""

    def __init__(self, output: Path, num_blocks: int, is_stuck: bool) -> None:
        super().__init__(FileStore(f"file://{output}"), output)
        self.num_done, self._num_blocks, self._is_stuck = 0, num_blocks, is_stuck
        self._entries: dict[str, FileEntry] = {}

    @property
    def progress(self) -> tuple[int, ...]:
        return (self.num_done,)

    def add_part(self, _version: int, entry: FileEntry) -> float:
        self._entries[entry.name] = entry
        return 0.0

    def read_receipts(self, _version: int, _names: Sequence[str]) -> dict[str, FileEntry]:
        return dict(self._entries)

    def publish_version(self, manifest: Manifest, _parts: Sequence[FileEntry]) -> None:
        for _ in range(self._num_blocks):
            time.sleep(0.1)
            self.num_done += not self._is_stuck
        self._storage.publish_version(manifest)


def test_machines_that_share_a_disk_upload_their_parts_side_by_side(tmp_path, monkeypatch):
    """Rank 0 uploads its own part, and publishes when the other machine's receipt is at the URL."""
    monkeypatch.setattr(Mirror, "poll_seconds", 0.02)
    disk, url = tmp_path / "run" / "checkpoint", f"file://{tmp_path}/bucket/run"
    both = [Mirror(open_store(url), tmp_path / "run", commit_seconds=0.2) for _ in range(2)]
    both[1].nonce = both[0].nonce
    both[0].take(lambda saved: None)
    uploads: list[tuple[bool, str]] = []
    real = FileStore.upload

    def upload(store, path, name):
        is_second = store is both[1]._store._store
        if is_second:
            time.sleep(0.1)
            if "/v2/" in name:
                raise PermissionError("not yours")
        uploads.append((is_second, path.name))
        real(store, path, name)

    monkeypatch.setattr(FileStore, "upload", upload)
    real_remove, removals = FileStore.remove, []

    def remove(store, name):
        removals.append(name)
        if len(removals) == 1:
            raise ConnectionError("the server hung up")
        real_remove(store, name)

    monkeypatch.setattr(FileStore, "remove", remove)
    monkeypatch.setattr("dglkge.checkpoint.stores.FIRST_PAUSE_SECONDS", 0.01)

    def save_as_one_of_two(manager):
        manager.group = dataclasses.replace(manager.group, limit_seconds=1.0)
        manager._mirror, manager._has_store = both[manager.group.rank], True
        return start_saving(manager)

    outcomes = together([disk] * 2, save_as_one_of_two)
    assert (True, "embeddings_person_0.v1.h5") not in uploads
    assert (False, "embeddings_person_1.v1.h5") not in uploads
    assert outcomes == ["1", "1"]
    assert (True, "entity_names_person_1.json") in uploads
    copy = open_checkpoint(tmp_path / "bucket" / "run", verify=True)
    assert same(copy["person"][:], toy_tables(META, 4)["person"].rows)
    assert set(os.listdir(copy.folder)) == set(os.listdir(disk / "v1"))  # no receipt is left
    # A part that is on the disk, and not at the URL, is missing.
    outcomes = together([disk] * 2, save_as_one_of_two)
    assert "embeddings_person_1.v2.h5.receipt.json is missing: no part has come" in outcomes[0]
    assert open_checkpoint(tmp_path / "bucket" / "run", verify=True).version == 1


@pytest.mark.parametrize("is_stuck", [False, True])
def test_waiting_for_a_write_follows_its_progress(tmp_path, monkeypatch, is_stuck):
    """After a fixed time the other trainers ended the job, so no larger version was ever saved."""
    monkeypatch.setattr(managers, "PROGRESS_SECONDS", 0.05)
    mirror = SlowMirror(tmp_path, 25, is_stuck)

    def save_slowly(manager):
        manager.group = dataclasses.replace(manager.group, limit_seconds=1.5)
        manager._mirror, manager._has_store = mirror, True
        return start_saving(manager)

    outcomes = together([tmp_path / "checkpoint"] * 2, save_slowly)
    if is_stuck:
        assert outcomes == ["error: a version was not written: nothing has changed for 1.5 s"] * 2
    else:
        assert outcomes == ["1", "1"] and mirror.num_done == 25
        assert open_checkpoint(tmp_path).version == 1
