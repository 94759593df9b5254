"""Two machines without a shared disk: the first one holds the whole checkpoint, the other keeps nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dglkge.checkpoint import CheckpointManager
from dglkge.checkpoint import courier as courier_module
from dglkge.checkpoint.courier import Courier
from dglkge.checkpoint.layout import OUTBOX_FOLDER
from dglkge.checkpoint.storage import CheckpointStorage, check_rows, check_texts
from dglkge.distributed.process_group import end_process_group
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.errors import CheckpointError
from dglkge.typing import RELATION, TablePart
from tests.checkpoint.toy_checkpoint import TWO_PAIRS, blank, cut, toy_meta, toy_names, toy_tables
from tests.optim.cluster import forked

MACHINE_OF = (0, 0, 1)
LEADERS = (0, 2)
LIMIT_SECONDS = 120
GATHER = Cluster(World(), None).gather_texts


def run_all(target, folder: Path) -> None:
    """Run a function as three trainers of two machines, each to a good end."""
    processes = [forked(target, rank, folder) for rank in range(len(MACHINE_OF))]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT_SECONDS)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def join(rank: int, folder: Path) -> Courier:
    """Make the process group."""
    torch.set_num_threads(1)
    method = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=len(MACHINE_OF))
    return Courier(rank, LEADERS, 30.0)


def disk(folder: Path, machine: int) -> Path:
    """The checkpoint's folder on a machine's own disk."""
    return folder / f"machine{machine}" / "checkpoint"


def tables_of(machine: int, seed: int) -> tuple:
    """The toy run's parts on one machine, and its relations."""
    meta = toy_meta(relations=TWO_PAIRS)
    tables = toy_tables(meta, seed)
    parts = [cut(name, tables[name], 2)[machine] for name in meta.entity_types]
    relations = tables[RELATION]
    ids = torch.arange(len(meta.relations))
    return meta, parts, TablePart(RELATION, 0, ids, relations.rows, relations.state)


def save_three_versions(rank: int, folder: Path) -> None:
    """Two in the foreground, one beside; the second machine's disk stays as it was at the start."""
    courier = join(rank, folder)
    machine = MACHINE_OF[rank]
    is_writer = rank in LEADERS
    meta = toy_meta(relations=TWO_PAIRS)
    arguments = (disk(folder, machine), rank, is_writer, dist.barrier, toy_names(meta), 2)
    manager = CheckpointManager(*arguments, courier=courier, gather=GATHER)
    for seed in (1, 2, 3):
        meta, parts, relations = tables_of(machine, seed)
        save = manager.start if seed == 3 else manager.save
        assert save(parts, relations if rank == 0 else None, meta) == seed
    manager.finish()
    end_process_group()


def restore_from_own_disk(rank: int, folder: Path) -> None:
    """Each machine fills its parts from the copy that it was brought, then the run goes on."""
    courier = join(rank, folder)
    machine = MACHINE_OF[rank]
    meta, parts, relations = tables_of(machine, 3)
    arguments = (disk(folder, machine), rank, rank in LEADERS, dist.barrier, toy_names(meta), 2)
    manager = CheckpointManager(*arguments, courier=courier, gather=GATHER)
    live = [blank(part) for part in parts]
    manager.restore(live, blank(relations))
    for part, filled in zip(parts, live):
        assert torch.equal(part.rows.view(torch.int32), filled.rows.view(torch.int32))
    assert manager.save(parts, relations if rank == 0 else None, meta) == 4
    end_process_group()


@pytest.mark.timeout(3 * LIMIT_SECONDS)
def test_first_disk_holds_everything(tmp_path: Path) -> None:
    """Every version is whole there and nowhere else; a copy of it restores on every machine."""
    run_all(save_three_versions, tmp_path)
    storage = CheckpointStorage(disk(tmp_path, 0))
    manifest = storage.published()
    assert manifest.version == 3
    folder = storage.folder(3).path
    check_rows(folder, manifest, checksums=True)
    check_texts(folder, manifest)
    parts = sorted((entry.table, entry.part) for entry in manifest.files)
    assert parts == [("film", 0), ("film", 1), ("person", 0), ("person", 1), (RELATION, 0)]
    assert len(list(folder.glob("entity_names_*.json"))) == 4
    assert not list(folder.glob("*.receipt.json"))
    other = disk(tmp_path, 1)
    assert not other.exists()
    assert not list(other.parent.glob(f"{OUTBOX_FOLDER}*"))
    shutil.copytree(storage.path, other, symlinks=True)
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    run_all(restore_from_own_disk, tmp_path)
    assert storage.published().version == 4
    assert CheckpointStorage(other).published().version == 3


class OneMessage:
    """A courier whose other machine sends what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *messages: bytes) -> None:
        self.messages = list(messages)
        monkeypatch.setattr(dist, "new_group", lambda *_, **__: None)
        monkeypatch.setattr(dist, "recv", self.recv)
        monkeypatch.setattr(dist, "send", lambda *_, **__: None)
        self.courier = Courier(0, LEADERS, 1.0)

    def recv(self, target: torch.Tensor, _source: int, group: object = None) -> None:
        if target.dtype == torch.int64:
            target[0] = len(self.messages[0])
        else:
            target.copy_(torch.frombuffer(bytearray(self.messages.pop(0)), dtype=torch.uint8))


def test_damage_on_the_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file that is not what its receipt says is no part of a checkpoint."""
    receipt = json.dumps({"crc32": 1}).encode()
    listed = json.dumps([["model.v1.h5", 3], ["model.v1.h5.receipt.json", len(receipt)]]).encode()
    other = OneMessage(monkeypatch, listed, b"abc", receipt)
    with pytest.raises(CheckpointError, match=r"model\.v1\.h5 was damaged on its way from rank 2"):
        other.courier.receive(CheckpointStorage(tmp_path))


@pytest.mark.parametrize("name", ["../x", ".hidden", "/etc/x"])
def test_names_stay_in_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """A file goes nowhere but into the checkpoint's folder."""
    other = OneMessage(monkeypatch, json.dumps([[name, 0]]).encode())
    with pytest.raises(CheckpointError, match="sent a file named"):
        other.courier.receive(CheckpointStorage(tmp_path))


SLOW_LIMIT_SECONDS = 6.0
SLOW_MACHINES = 4


def slow_machine(rank: int, folder: Path, fault: str) -> None:
    """Send one file of a few blocks; machine 1 pauses before each, or writes for long, or dies."""
    torch.set_num_threads(1)
    method = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=SLOW_MACHINES)
    carrier = Courier(rank, range(SLOW_MACHINES), SLOW_LIMIT_SECONDS)
    if rank == 0:
        storage = CheckpointStorage(folder / "checkpoint")
        storage.prepare()
        try:
            carrier.receive(storage)
            (folder / "outcome").write_text("all received")
        except CheckpointError as error:
            (folder / "outcome").write_text(str(error))
        os._exit(0)
    outbox = folder / f"outbox{rank}"
    outbox.mkdir()
    (outbox / f"vocabulary_{rank}.txt").write_bytes(bytes([rank]) * (5 * courier_module.BLOCK_BYTES))
    if rank == 1 and fault == "slow":
        real = carrier._send

        def send(values: torch.Tensor) -> None:
            time.sleep(SLOW_LIMIT_SECONDS / 3)
            real(values)

        carrier._send = send
    if rank == 1 and fault == "writes long":
        courier_module.PROGRESS_SECONDS = SLOW_LIMIT_SECONDS / 4
        with carrier.sending_heartbeats(time.monotonic):
            time.sleep(2 * SLOW_LIMIT_SECONDS)
    if rank == 1 and fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and fault == "is silent":
        with carrier.sending_heartbeats(lambda: "nothing changes"):
            time.sleep(LIMIT_SECONDS)
    try:
        carrier.send(outbox)
    except CheckpointError as error:
        (folder / f"error{rank}").write_text(str(error))
    os._exit(0)


@pytest.mark.timeout(3 * LIMIT_SECONDS)
@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("slow", "all received"),
        ("writes long", "all received"),
        ("dies", "rank 1 did not send its parts: "),
        ("is silent", "rank 1 did not send its parts: "),
    ],
)
def test_machines_send_side_by_side(tmp_path: Path, fault: str, outcome: str):
    """A slow one takes longer than the limit in all and keeps no other waiting; a dead one is noticed."""
    processes = [forked(slow_machine, rank, tmp_path, fault) for rank in range(SLOW_MACHINES)]
    try:
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            if (rank, fault) != (1, "is silent"):
                process.join(LIMIT_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert (tmp_path / "outcome").read_text().startswith(outcome)
    codes = [process.exitcode for process in processes]
    assert codes == [0, 0 if outcome == "all received" else -signal.SIGKILL, 0, 0]
    for rank in (1, 2, 3) if outcome == "all received" else ():
        received = (tmp_path / "checkpoint" / f"vocabulary_{rank}.txt").read_bytes()
        assert received == bytes([rank]) * (5 * courier_module.BLOCK_BYTES)
        assert not (tmp_path / f"error{rank}").exists() and not (tmp_path / f"outbox{rank}").exists()
