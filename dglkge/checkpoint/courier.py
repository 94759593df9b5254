"""Checkpoints of machines that share no disk: each sends the files it wrote to the first machine.

The first machine's folder then is the checkpoint, like any other: whole, published in one step after every
file has been brought to its disk. The others keep what they write in an outbox until it is delivered.
"""

from __future__ import annotations

import datetime
import json
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dglkge.checkpoint import layout
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.errors import CheckpointError

BLOCK_BYTES = 4 << 20
OUTBOX_FOLDER = "outbox"


class Courier:
    """Carries files between one trainer of each machine, in threads beside training; made by all trainers.

    Parameters
    ----------
    rank : int
        This trainer's rank.
    leaders : sequence of int
        The rank of the trainer that writes, of each machine; the first is 0.
    limit_seconds : float
        How long one side waits for the other.
    """

    def __init__(self, rank: int, leaders: Sequence[int], limit_seconds: float) -> None:
        self.is_first = rank == 0
        self.rank = rank
        self._leaders = list(leaders)
        limit = datetime.timedelta(seconds=limit_seconds)
        # a group of its own: training uses the others at the same time
        self._group: Any = dist.new_group(self._leaders, timeout=limit, backend="gloo")

    def agree(self, version: int) -> int:
        """Return what rank 0 says; a collective of all trainers."""
        said = torch.tensor([version])
        dist.broadcast(said, 0)
        return int(said)

    def send(self, outbox: Path) -> None:
        """Deliver all files of a folder to the first machine, then remove it.

        Raises
        ------
        CheckpointError
            If the first machine does not take them.
        """
        paths = sorted(outbox.iterdir())
        sizes = [path.stat().st_size for path in paths]
        try:
            self._send_bytes(json.dumps([[path.name, size] for path, size in zip(paths, sizes)]).encode())
            buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
            for path, size in zip(paths, sizes):
                with open(path, "rb", buffering=0) as file:
                    while size:
                        count = file.readinto(buffer[: min(size, BLOCK_BYTES)].numpy().data)
                        self._send(buffer[:count])
                        size -= count
            # the first machine answers when all is on its disk
            dist.recv(torch.empty(1, dtype=torch.int64), 0, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(
                f"the first machine did not take the checkpoint's parts: {error}"
            ) from error
        shutil.rmtree(outbox)

    def receive(self, storage: CheckpointStorage) -> None:
        """Take the files of all other machines into the checkpoint's folder, and hold them to their receipts.

        Raises
        ------
        CheckpointError
            If a machine does not send its files, or a file arrives damaged.
        """
        for leader in self._leaders[1:]:
            try:
                checksums = self._receive_files(leader, storage)
                dist.send(torch.zeros(1, dtype=torch.int64), leader, group=self._group)
            except RuntimeError as error:
                raise CheckpointError(f"rank {leader} did not send its parts: {error}") from error
            for name, checksum in checksums.items():
                receipt = storage.path / layout.receipt_file(name)
                if receipt.name in checksums:
                    expected = json.loads(receipt.read_text(encoding="utf-8"))["crc32"]
                    if checksum != expected:
                        raise CheckpointError(
                            f"{storage.path / name} was damaged on its way from rank {leader}"
                        )

    def _receive_files(self, leader: int, storage: CheckpointStorage) -> dict[str, int]:
        """Write what one machine sends; return the CRC-32 of each file."""
        checksums = {}
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        for name, size in json.loads(self._receive_bytes(leader)):
            if "/" in name or name.startswith("."):
                raise CheckpointError(f"rank {leader} sent a file named {name!r}")
            checksum = 0
            with storage.new_file(name) as path, open(path, "wb") as file:
                while size:
                    block = buffer[: min(size, BLOCK_BYTES)]
                    dist.recv(block, leader, group=self._group)
                    content = block.numpy().data
                    checksum = zlib.crc32(content, checksum)
                    file.write(content)
                    size -= len(block)
            checksums[name] = checksum
        return checksums

    def _send_bytes(self, data: bytes) -> None:
        """Send the length, then the bytes."""
        self._send(torch.tensor([len(data)]))
        self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _send(self, values: torch.Tensor) -> None:
        """Send to the first machine."""
        dist.send(values, 0, group=self._group)

    def _receive_bytes(self, leader: int) -> bytes:
        """Receive what :meth:`_send_bytes` sends."""
        length = torch.empty(1, dtype=torch.int64)
        dist.recv(length, leader, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(data, leader, group=self._group)
        return data.numpy().tobytes()


def empty_outbox(checkpoint: Path, rank: int) -> Path:
    """Make the folder beside a checkpoint's in which a machine keeps what it has not delivered yet."""
    outbox = checkpoint.with_name(f"{OUTBOX_FOLDER}_{rank}")
    try:
        shutil.rmtree(outbox, ignore_errors=True)
        outbox.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot write to {outbox}: {error.strerror}") from error
    return outbox
