"""Several machines, with a common disk or a store: all go on from one version, or end with one error."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dglkge.checkpoint import manager as managers
from dglkge.checkpoint.layout import BEST
from dglkge.checkpoint.manager import CheckpointManager, TrainerGroup
from dglkge.checkpoint.manifest import check_same_run
from dglkge.checkpoint.mirror import Mirror
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.checkpoint.stores import FileStore, open_store
from dglkge.distributed.lease import LeaseTaker, new_nonce
from dglkge.distributed.process_group import agree
from dglkge.errors import DglkgeError, StorageError
from dglkge.typing import RELATION
from tests.checkpoint import toy_checkpoint as toy
from tests.checkpoint.toy_checkpoint import META

LIMIT_SECONDS = 60
FIRST = "embeddings_person_0"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managers, "AGREEMENT_SECONDS", 1.0)
    monkeypatch.setattr(managers, "AGREEMENT_POLL_SECONDS", 0.05)
    monkeypatch.setattr(Mirror, "poll_seconds", 0.02)
    monkeypatch.setattr("dglkge.checkpoint.stores.FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("dglkge.checkpoint.stores.RETRY_SECONDS", 0.05)


class Gathering:
    """The collectives of trainers in threads."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=LIMIT_SECONDS)
        self.texts = [""] * num_ranks

    def group(self, rank: int, limit_seconds: float) -> TrainerGroup:
        def gather(text: str) -> list[str]:
            self.texts[rank] = text
            self.barrier.wait()
            texts = list(self.texts)
            self.barrier.wait()
            return texts

        return TrainerGroup(rank, True, self.barrier.wait, gather, limit_seconds)


def together(disks, work, limit_seconds=LIMIT_SECONDS):
    """Do some work as the leader of each machine; return the error of each, or what it returned as text."""
    gathering = Gathering(len(disks))
    outcomes = [""] * len(disks)

    def leader(rank: int) -> None:
        manager = CheckpointManager(disks[rank], gathering.group(rank, limit_seconds), toy.toy_names(META))
        try:
            outcomes[rank] = str(work(manager))
        except StorageError as error:
            outcomes[rank] = f"StorageError: {error}"
        except DglkgeError as error:
            outcomes[rank] = f"error: {error}"

    toy.in_threads(len(disks), leader)
    return outcomes


def save_share(manager: CheckpointManager, *seeds: int) -> int:
    """Write the next versions as one of two machines; return the last one's number."""
    manager.num_parts, is_first = 2, manager.group.rank == 0
    for seed in seeds:
        tables = toy.toy_tables(META, seed)
        parts = [toy.cut("person", tables["person"], 2)[manager.group.rank]]
        version = manager.save(parts, toy.whole_part(tables, RELATION) if is_first else None, META)
    return version


def blank_part(rank: int, num_parts: int = 2):
    return toy.blank(toy.cut("person", toy.toy_tables(META)["person"], num_parts)[rank])


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    """The copies of two machines: version 1, which is kept, and version 2."""
    first, second = tmp_path / "0" / "checkpoint", tmp_path / "1" / "checkpoint"
    toy.save_seed(first, 1, "epoch_1")
    toy.save_seed(first, 2)
    second.parent.mkdir()
    shutil.copytree(first, second, symlinks=True)
    return [first, second]


def resume(manager: CheckpointManager) -> str:
    if manager.latest() is None:
        return "starts anew"
    agree(manager.group.gather, lambda: manager.restore([blank_part(0, 1)]))
    return f"resumed from {manager.storage.named_version()}"


def other_content(disk: Path) -> None:
    shutil.rmtree(disk)
    for seed in (7, 8):
        toy.save_seed(disk, seed)


DIFFERENT = "error: the trainers do not find the same checkpoint: rank 0 has"


@pytest.mark.parametrize(("rank", "change", "words"), [
    # Rank 0 would start anew, and rank 1 restore: each would wait for the other for ever.
    (0, shutil.rmtree, rf"{DIFFERENT} none in .*/0/checkpoint on .*rank 1 has version 2 \(manifest "),
    (1, other_content, f"{DIFFERENT} version 2"),
    (1, lambda disk: toy.flip(disk / "v2" / f"{FIRST}.v2.h5"), f"error: rank 1: .*{FIRST}.v2.h5 is damaged"),
])  # fmt: skip
def test_a_disk_with_another_version_ends_all(disks, rank, change, words):
    change(disks[rank])
    outcomes = together(disks, resume)
    assert outcomes[0] == outcomes[1] and "\n" not in outcomes[0]
    assert re.match(words, outcomes[0])


def test_trainers_that_see_different_versions_do_not_save(disks):
    """Two folders that should be one: a disk that is not mounted on one machine."""
    toy.save_seed(disks[0], 3)
    outcomes = together(disks, lambda manager: save_share(manager, 4))
    assert outcomes[0] == outcomes[1] and "do not find the same checkpoint" in outcomes[0]
    assert [open_checkpoint(disk).version for disk in disks] == [3, 2]


def test_a_fallback_that_fails_on_rank_0_ends_all(tmp_path, disks, monkeypatch):
    """On one disk that all see; the others waited at a barrier."""
    toy.save_seed(tmp_path, 1)
    toy.flip(tmp_path / "v1" / f"{FIRST}.v1.h5", 2500)
    outcomes = together([tmp_path] * 2, lambda manager: manager.fall_back())
    assert outcomes[0] == outcomes[1] and "its checksum is not the one in the manifest" in outcomes[0]
    toy.flip(disks[0] / "v2" / f"{FIRST}.v2.h5", 2500)
    real = os.replace

    def failing(source, target):
        if "damaged_v2" in str(target) and str(target).startswith(str(disks[0])):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    outcomes = together([disks[0]] * 2, lambda manager: manager.fall_back())
    assert outcomes == [f"StorageError: cannot write to {disks[0]}: Input/output error"] * 2


def test_waits_in_a_fallback_allow_for_all_that_is_read(disks):
    """A barrier of fixed length ended the others while one trainer read every version on a slow disk."""
    for disk in disks:
        toy.flip(disk / "v2" / f"{FIRST}.v2.h5", 2500)
    largest = max(sum(path.stat().st_size for path in disk.glob("v*/*")) for disk in disks)
    waits: list[tuple[int, int]] = []

    def work(manager):
        manager.fall_back(lambda num_bytes: waits.append((manager.group.rank, num_bytes)))

    together(disks, work)
    assert sorted(waits) == [(rank, 2 * largest) for rank in (0, 1)]


@pytest.mark.parametrize("work_of_all, outcome", [("save", "3"), ("resume", "resumed from 2")])
def test_a_host_that_sees_a_version_late_is_waited_for(disks, monkeypatch, work_of_all, outcome):
    """What a shared disk shows of another host's files may be some seconds old."""
    monkeypatch.setattr(managers, "AGREEMENT_SECONDS", float(LIMIT_SECONDS))
    real, calls = CheckpointStorage.published, []
    seen_late: list[threading.Thread] = []

    def late(storage, texts=True):
        if threading.current_thread() in seen_late and len(calls) < 3:
            calls.append(1)
            return None
        return real(storage, texts=texts)

    def work(manager):
        if manager.group.rank == 1:
            seen_late.append(threading.current_thread())
        return save_share(manager, 4) if work_of_all == "save" else resume(manager)

    monkeypatch.setattr(CheckpointStorage, "published", late)
    assert together([disks[0]] * 2, work) == [outcome] * 2
    assert len(calls) == 3


@pytest.mark.parametrize("is_stuck", [False, True])
def test_waiting_for_a_write_follows_its_progress(tmp_path, monkeypatch, is_stuck):
    """After a fixed time the other trainers ended the job, so no larger version was ever saved."""
    real, num_done = CheckpointStorage.publish_version, [0]

    def publish_slowly(storage, manifest, parts=()):
        for _ in range(25):
            time.sleep(0.1)
            num_done[0] += not is_stuck
        real(storage, manifest, parts)

    monkeypatch.setattr(managers, "PROGRESS_SECONDS", 0.05)
    monkeypatch.setattr(CheckpointStorage, "publish_version", publish_slowly)
    monkeypatch.setattr(CheckpointStorage, "progress", property(lambda storage: tuple(num_done)))
    outcomes = together([tmp_path] * 2, lambda manager: save_share(manager, 4), 1.5)
    stuck = "error: a version was not written: nothing has changed for 1.5 s"
    assert outcomes == [stuck if is_stuck else "1"] * 2
    assert is_stuck or open_checkpoint(tmp_path).version == 1


def test_machines_that_share_a_disk_upload_their_parts_side_by_side(tmp_path, monkeypatch):
    """Rank 0 uploads its own part, and publishes when the other machine's receipt is at the URL."""
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

    def save_as_one_of_two(manager):
        manager._mirror = both[manager.group.rank]
        return save_share(manager, 4)

    assert together([disk] * 2, save_as_one_of_two, 1.0) == ["1", "1"]
    assert (True, f"{FIRST}.v1.h5") not in uploads
    assert (False, "embeddings_person_1.v1.h5") not in uploads
    assert (True, "entity_names_person_1.json") in uploads
    bucket = tmp_path / "bucket" / "run"
    toy.holds(bucket, {1: toy.toy_tables(META, 4)})
    assert set(os.listdir(bucket / "checkpoint" / "v1")) == set(os.listdir(disk / "v1"))  # no receipt is left


class Cluster:
    """Two machines, each with a folder and a trainer in a thread, and a store that both reach."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.store.mkdir()
        self.runs = [folder / "machine0", folder / "machine1"]

    def start(self, work, order=(0, 1)):
        """Start a job with the machines in an order; return what each trainer returned, or its error."""
        gathering, nonce = Gathering(len(order)), new_nonce()
        outcomes: list[object] = [None] * len(order)

        def trainer(rank: int) -> None:
            run, group = self.runs[order[rank]], gathering.group(rank, 2.0)
            lease = LeaseTaker(run, nonce).take()
            mirror = Mirror(FileStore(f"file://{self.store}"), run, lease, commit_seconds=1.0)

            def take_and_fill() -> None:
                if rank == 0:
                    mirror.fill(mirror.take(lambda saved: check_same_run(saved, META)))

            def fill_after_it() -> None:
                if rank > 0:
                    mirror.fill(mirror.newest())

            try:
                for step in (take_and_fill, fill_after_it):
                    agree(group.gather, step)
                options = {"lease": lease, "mirror": mirror}
                path, names = run / "checkpoint", toy.toy_names(META)
                outcomes[rank] = work(CheckpointManager(path, group, names, len(order), **options))
            except DglkgeError as error:
                outcomes[rank] = str(error)
            finally:
                lease.release()

        toy.in_threads(len(order), trainer)
        return outcomes

    def save(self, *seeds: int, order: Sequence[int] = (0, 1)) -> list[object]:
        return self.start(lambda manager: save_share(manager, *seeds), order)

    def check_restored(self, seed: int, order: Sequence[int] = (0, 1)) -> None:
        """Start a job, and check that each machine fills its part with the rows of a seed."""
        check_rows(self.start(filled, order), seed)


def filled(manager: CheckpointManager, pointer: str = "") -> torch.Tensor:
    """Fill this machine's part; return the rows."""
    part = blank_part(manager.group.rank)
    manager.restore([part], pointer=pointer)
    return part.rows


def check_rows(outcomes: list[object], seed: int) -> None:
    parts = toy.cut("person", toy.toy_tables(META, seed)["person"], 2)
    assert all(toy.same(rows, part.rows) for rows, part in zip(outcomes, parts))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_each_machine_writes_its_own_parts_to_the_store(cluster):
    assert cluster.save(1, 2, 3) == [3, 3]
    assert toy.holds(cluster.store, {3: toy.toy_tables(META, 3)}) == 3
    assert not list(cluster.store.rglob("*.receipt.json"))
    assert [path.name for path in (cluster.store / "checkpoint").glob("v*")] == ["v3"]
    # What a machine has on its disk are its own parts, of the newest versions only.
    parts = [{path.name for path in run.rglob("*.h5")} for run in cluster.runs]
    assert parts[1] >= {"embeddings_person_1.v3.h5"} and "model.v3.h5" in parts[0]
    assert not [name for name in parts[1] if "_1." not in name or ".v1." in name]
    # The order of names is that of the version before, so the store copies them inside.
    assert len(list((cluster.store / "checkpoint" / "v3").glob("entity_names_*.json"))) == 2


def test_machines_in_another_order_or_fresh_or_damaged_are_filled(cluster):
    cluster.save(1, 2)
    cluster.check_restored(2, (1, 0))
    assert cluster.save(3, order=(1, 0)) == [3, 3]
    shutil.rmtree(cluster.runs[0])
    toy.flip(cluster.runs[1] / "checkpoint" / "v3" / f"{FIRST}.v3.h5", 2500)
    cluster.check_restored(3, (1, 0))
    cluster.check_restored(3)


def test_a_run_that_was_removed_from_the_store_does_not_come_back(cluster):
    cluster.save(1, 2)
    shutil.rmtree(cluster.store / "checkpoint")
    outcome = str(cluster.save(3)[0])
    assert outcome.startswith(f"file://{cluster.store} has no version of this run, and {cluster.runs[0]} on ")
    assert "version 2 of run " in outcome and "to start anew, move the folder away" in outcome
    assert not (cluster.store / "checkpoint" / "checkpoint_version.txt").exists()


def test_a_part_that_does_not_come_ends_all(cluster, monkeypatch, caplog):
    real = FileStore.upload

    def upload(store, path, name):
        if name.endswith("_1.v1.h5"):
            raise PermissionError("not yours")
        real(store, path, name)

    monkeypatch.setattr(FileStore, "upload", upload)
    outcomes = cluster.save(1)
    assert outcomes[0] == outcomes[1]
    assert "embeddings_person_1.v1.h5.receipt.json is missing: no part has come to file:" in outcomes[0]
    assert f"cannot write file://{cluster.store}/checkpoint/v1/embeddings_" in caplog.text
    assert ": not yours" in caplog.text
    assert not (cluster.store / "checkpoint" / "checkpoint_version.txt").exists()


def test_the_best_version_is_read_on_every_machine(cluster):
    def train(manager: CheckpointManager) -> torch.Tensor:
        save_share(manager, 1)
        if manager.group.rank == 0:
            assert manager.keep_best(0.5, {})
        save_share(manager, 2, 3)
        manager.bring(BEST)
        manager.group.barrier()
        return filled(manager, BEST)

    check_rows(cluster.start(train), 1)

    # A machine that was the first one before does not bring its older pointer back.
    def improve(manager: CheckpointManager) -> None:
        save_share(manager, 4)
        if manager.group.rank == 0:
            assert manager.keep_best(0.7, {})
        save_share(manager, 5)

    cluster.start(improve, (1, 0))

    def scores(manager: CheckpointManager) -> float:
        save_share(manager, 6)
        return manager.storage.read_pointer(BEST)["score"]

    assert cluster.start(scores)[0] == 0.7
    assert open_checkpoint(cluster.store / "checkpoint" / BEST, verify=True).version == 4
