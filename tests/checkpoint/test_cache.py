"""Machines without a common disk: the store has the run, and the folder of each machine is a cache of it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from dglkge.checkpoint import CheckpointManager, TrainerGroup, open_checkpoint
from dglkge.checkpoint.layout import BEST
from dglkge.checkpoint.manifest import CheckpointMeta, check_same_run
from dglkge.checkpoint.mirror import Mirror
from dglkge.checkpoint.stores import FileStore
from dglkge.distributed.lease import LeaseTaker, new_nonce
from dglkge.errors import DglkgeError
from dglkge.typing import RELATION
from tests.checkpoint.test_agreement import Gathering
from tests.checkpoint.toy_checkpoint import (
    TWO_PAIRS,
    blank,
    cut,
    flip,
    in_threads,
    same,
    toy_meta,
    toy_names,
    toy_tables,
)

META = toy_meta(relations=TWO_PAIRS)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mirror, "poll_seconds", 0.02)
    monkeypatch.setattr("dglkge.checkpoint.stores.FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("dglkge.checkpoint.stores.RETRY_SECONDS", 0.05)


def refuse_other_runs(saved: CheckpointMeta) -> None:
    """Refuse another run, as a trainer does."""
    check_same_run(saved, META)


class Cluster:
    """Two machines, each with a folder and a trainer in a thread, and a store that both reach."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.store.mkdir()
        self.runs = [folder / "machine0", folder / "machine1"]

    def start(
        self, work: Callable[[CheckpointManager], object], order: Sequence[int] = (0, 1)
    ) -> list[object]:
        """Start a job with the machines in an order; return what each trainer returned, or its error."""
        gathering = Gathering(len(order))
        outcomes: list[object] = [None] * len(order)
        nonce = new_nonce()

        def trainer(rank: int) -> None:
            run = self.runs[order[rank]]
            lease = LeaseTaker(run, nonce).take()
            mirror = Mirror(FileStore(f"file://{self.store}"), run, lease, commit_seconds=1.0)
            is_filled = False
            try:
                if rank == 0:
                    mirror.fill(mirror.take(refuse_other_runs))
                gathering.barrier.wait()
                if rank > 0:
                    mirror.fill(mirror.newest())
                gathering.barrier.wait()
                is_filled = True
                group = TrainerGroup(rank, True, gathering.barrier.wait, gathering.of(rank), 2.0)
                manager = CheckpointManager(
                    run / "checkpoint", group, toy_names(META), len(order), lease, mirror, has_store=True
                )
                outcomes[rank] = work(manager)
            except DglkgeError as error:
                outcomes[rank] = str(error)
                if not is_filled:
                    gathering.barrier.abort()
            except threading.BrokenBarrierError:
                pass
            finally:
                lease.release()

        in_threads(len(order), trainer)
        return outcomes


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def save(*seeds: int) -> Callable[[CheckpointManager], int]:
    def work(manager: CheckpointManager) -> int:
        for seed in seeds:
            tables = toy_tables(META, seed)
            parts = [cut(name, tables[name], 2)[manager.group.rank] for name in META.entity_types]
            relations = cut(RELATION, tables[RELATION], 1)[0] if manager.group.rank == 0 else None
            version = manager.save(parts, relations, META)
        return version

    return work


def restored(manager: CheckpointManager) -> list[torch.Tensor]:
    """Fill parts as a trainer does at its start; return the rows of people and films of this machine."""
    assert manager.latest() is not None
    tables = toy_tables(META, 99)
    parts = [blank(cut(name, tables[name], 2)[manager.group.rank]) for name in META.entity_types]
    manager.restore(parts)
    return [part.rows for part in parts]


def check_restored(outcomes: list[object], seed: int) -> None:
    tables = toy_tables(META, seed)
    for rank, rows in enumerate(outcomes):
        for name, part in zip(META.entity_types, rows):
            assert same(part, cut(name, tables[name], 2)[rank].rows)


def parts_in(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.h5")}


def test_each_machine_writes_its_own_parts_to_the_store(cluster):
    assert cluster.start(save(1, 2, 3)) == [3, 3]
    run = open_checkpoint(cluster.store, verify=True)
    tables = toy_tables(META, 3)
    assert run.version == 3 and all(same(run[name][:], tables[name].rows) for name in META.entity_types)
    assert not list(cluster.store.rglob("*.receipt.json"))
    assert [path.name for path in (cluster.store / "checkpoint").glob("v*")] == ["v3"]
    # What a machine has on its disk are its own parts, of the newest versions only.
    parts = {f"embeddings_{name}_1.v3.h5" for name in META.entity_types}
    assert parts_in(cluster.runs[1] / "checkpoint" / "v3") == parts
    assert not (cluster.runs[1] / "checkpoint" / "v1").exists()
    assert "model.v3.h5" in parts_in(cluster.runs[0] / "checkpoint" / "v3")
    # The order of names is that of the version before, so the store copies them inside.
    assert len(list((cluster.store / "checkpoint" / "v3").glob("entity_names_*.json"))) == 4


def test_a_job_goes_on_with_its_machines_in_another_order(cluster, monkeypatch):
    cluster.start(save(1, 2))
    fetched: list[str] = []
    real = FileStore.download
    monkeypatch.setattr(
        FileStore, "download", lambda self, name, path: fetched.append(name) or real(self, name, path)
    )
    check_restored(cluster.start(restored, (1, 0)), 2)
    # Files that a machine has written are on its disk: only the others' are downloaded.
    assert not [
        name for name in fetched if name.endswith("embeddings_person_0.v2.h5") and fetched.count(name) > 1
    ]
    assert cluster.start(save(3), (1, 0)) == [3, 3]
    check_restored(cluster.start(restored), 3)


def test_a_fresh_machine_and_one_with_a_damaged_file_are_filled(cluster):
    cluster.start(save(1))
    shutil.rmtree(cluster.runs[0])
    part = "checkpoint/v1/embeddings_person_1.v1.h5"
    flip(cluster.runs[1] / part, 2500)
    check_restored(cluster.start(restored), 1)


def test_a_run_that_was_removed_from_the_store_does_not_come_back(cluster):
    cluster.start(save(1, 2))
    shutil.rmtree(cluster.store / "checkpoint")
    outcome = str(cluster.start(save(3))[0])
    assert outcome.startswith(f"file://{cluster.store} has no version of this run, and {cluster.runs[0]} on ")
    assert "version 2 of run " in outcome and "to start anew, move the folder away" in outcome
    assert not (cluster.store / "checkpoint" / "checkpoint_version.txt").exists()


def test_killed_before_the_pointer_the_version_before_counts(cluster, monkeypatch):
    """The next job writes the same number again, over what was left."""
    cluster.start(save(1))
    real = FileStore.write

    def killed(store, name, content):
        if name.endswith("checkpoint/checkpoint_version.txt"):
            raise PermissionError("killed")
        real(store, name, content)

    monkeypatch.setattr(FileStore, "write", killed)
    assert "killed" in str(cluster.start(save(2))[0])
    monkeypatch.setattr(FileStore, "write", real)
    check_restored(cluster.start(restored), 1)
    assert cluster.start(save(4)) == [2, 2]
    check_restored(cluster.start(restored), 4)


def test_a_part_that_does_not_come_ends_all(cluster, monkeypatch, caplog):
    real = FileStore.upload

    def upload(store, path, name):
        if name.endswith("_1.v1.h5"):
            raise PermissionError("not yours")
        real(store, path, name)

    monkeypatch.setattr(FileStore, "upload", upload)
    outcomes = cluster.start(save(1))
    assert outcomes[0] == outcomes[1]
    assert "embeddings_person_1.v1.h5.receipt.json is missing: no part has come to file:" in outcomes[0]
    assert f"cannot write file://{cluster.store}/checkpoint/v1/embeddings_" in caplog.text
    assert ": not yours" in caplog.text
    assert not (cluster.store / "checkpoint" / "checkpoint_version.txt").exists()


def test_the_best_version_is_read_on_every_machine(cluster):
    def train(manager: CheckpointManager) -> list[torch.Tensor]:
        save(1)(manager)
        if manager.group.rank == 0:
            assert manager.keep_best(0.5, {})
        save(2, 3)(manager)
        manager.bring(BEST)
        manager.group.barrier()
        tables = toy_tables(META, 99)
        parts = [blank(cut(name, tables[name], 2)[manager.group.rank]) for name in META.entity_types]
        manager.restore(parts, pointer=BEST)
        return [part.rows for part in parts]

    check_restored(cluster.start(train), 1)

    # A machine that was the first one before does not bring its older pointer back.
    def improve(manager: CheckpointManager) -> None:
        save(4)(manager)
        if manager.group.rank == 0:
            assert manager.keep_best(0.7, {})
        save(5)(manager)

    cluster.start(improve, (1, 0))

    def scores(manager: CheckpointManager) -> float:
        save(6)(manager)
        return manager.storage.read_pointer(BEST)["score"]

    assert cluster.start(scores)[0] == 0.7
    assert open_checkpoint(cluster.store / "checkpoint" / BEST, verify=True).version == 4
