"""Checkpoints of machines that share no disk: each machine sends its files to the first one.

The first machine's folder is the checkpoint: it is published in one step after every file is on that
machine's disk. The other machines keep their files in an outbox folder until these are delivered.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dglkge.checkpoint import layout
from dglkge.checkpoint.durable import LeasedFolder
from dglkge.errors import CheckpointError, write_error

BLOCK_BYTES = 4 << 20
FLUSH_BYTES = 256 << 20
"""Received bytes are flushed in such steps: no single flush may exceed the sender's time limit."""
PROGRESS_SECONDS = 2.0
STILL_WRITING = -1
"""Heartbeat, sent instead of the length of a list of files: these are incomplete, but growing."""


class Courier:
    """Transfer of files from one trainer of each machine, in threads; created by all trainers.

    The first machine receives from all others at the same time. The time limit applies to each message and
    not to a whole transfer. The death of a trainer closes its connection, which raises an error. A machine
    that was cut off from the network is found by the limit.

    Parameters
    ----------
    rank : int
        This trainer's rank.
    leaders : sequence of int
        The rank of the trainer that writes, of each machine; the first is 0.
    limit_seconds : float
        Timeout of one side for the next block of the other, or for its next heartbeat.

    Attributes
    ----------
    num_blocks : int
        Messages that were sent or received, for the progress of a save.
    """

    def __init__(self, rank: int, leaders: Sequence[int], limit_seconds: float) -> None:
        self.is_first = rank == 0
        self.rank = rank
        self.num_blocks = 0
        self._leaders = list(leaders)
        self._is_abandoned = threading.Event()
        limit = datetime.timedelta(seconds=limit_seconds)
        # A separate process group: training sends messages over the others at the same time.
        self._group: Any = dist.new_group(self._leaders, timeout=limit, backend="gloo")

    @contextlib.contextmanager
    def sending_heartbeats(self, signs: Callable[[], object]) -> Iterator[None]:
        """Send heartbeats to the first machine inside the block, as long as ``signs`` changes.

        Writing a part may take longer than the first machine's timeout for a message.
        """
        is_done = threading.Event()

        def send_heartbeats() -> None:
            before = signs()
            while not is_done.wait(PROGRESS_SECONDS):
                now = signs()
                # No heartbeat without growth: a writer that hangs on its disk must run into the timeout.
                if now != before:
                    before = now
                    with contextlib.suppress(RuntimeError):  # the next :meth:`send` raises it
                        self._send(torch.tensor([STILL_WRITING]))

        thread = threading.Thread(target=send_heartbeats, name="dglkge-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()

    @contextlib.contextmanager
    def abandoning_on_error(self) -> Iterator[None]:
        """Stop receiving if the block fails: the version will not be published, and the job ends."""
        try:
            yield
        except BaseException:
            self._is_abandoned.set()
            raise

    def send(self, outbox: Path) -> None:
        """Send all files of a folder to the first machine, then remove the folder.

        Raises
        ------
        CheckpointError
            If the first machine does not receive them.
        """
        paths = sorted(outbox.iterdir())
        sizes = [path.stat().st_size for path in paths]
        try:
            self._send_bytes(json.dumps([[path.name, size] for path, size in zip(paths, sizes)]).encode())
            buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
            for path, size in zip(paths, sizes):
                # Unbuffered, into memory that is reused: no copy besides the one to the socket.
                with open(path, "rb", buffering=0) as file:
                    # Exactly the announced size is sent. A file that grew meanwhile must not shift the bytes
                    # of the next one.
                    while size:
                        count = file.readinto(buffer[: min(size, BLOCK_BYTES)].numpy().data)
                        if not count:
                            raise CheckpointError(f"{path} was cut short while it was sent")
                        self._send(buffer[:count])
                        size -= count
            # The first machine answers when all files are on its disk. Only then may they be removed here.
            dist.recv(torch.empty(1, dtype=torch.int64), 0, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(
                f"the first machine did not take the checkpoint's parts: {error}"
            ) from error
        except OSError as error:
            raise CheckpointError(f"cannot read {outbox}: {error.strerror or error}") from error
        shutil.rmtree(outbox)

    def receive(self, folder: LeasedFolder) -> None:
        """Receive the files of all other machines into the folder of the version, and verify their checksums.

        All machines send at the same time; a thread receives from each.

        Raises
        ------
        CheckpointError
            If a machine does not send its files, or a file arrives damaged.
        """
        others = self._leaders[1:]
        with ThreadPoolExecutor(len(others), "dglkge-courier") as threads, self.abandoning_on_error():
            receiving = [threads.submit(self._receive_from, leader, folder) for leader in others]
            for one in as_completed(receiving):
                one.result()

    def _receive_from(self, leader: int, folder: LeasedFolder) -> None:
        """Receive the files of one machine."""
        try:
            checksums = self._receive_files(leader, folder)
            # Sent after new_file() has renamed the last file: the sender removes its only other copy when it
            # receives this.
            dist.send(torch.zeros(1, dtype=torch.int64), leader, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(f"rank {leader} did not send its parts: {error}") from error
        # The checksum was taken from the received bytes; the receipt has that of the sender's file.
        for name, checksum in checksums.items():
            receipt = folder.path / layout.receipt_file(name)
            if receipt.name in checksums:
                expected = json.loads(receipt.read_text(encoding="utf-8"))["crc32"]
                if checksum != expected:
                    raise CheckpointError(f"{folder.path / name} was damaged on its way from rank {leader}")

    def _receive_files(self, leader: int, folder: LeasedFolder) -> dict[str, int]:
        """Write the files of one machine; return the CRC-32 of each."""
        checksums = {}
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        for name, size in json.loads(self._receive_bytes(leader)):
            # A name from the network must not lead out of the folder.
            if "/" in name or name.startswith("."):
                raise CheckpointError(f"rank {leader} sent a file named {name!r}")
            checksum = unflushed = 0
            with folder.new_file(name) as path, open(path, "wb") as file:
                # new_file() renames the file once it is complete, so rank 0's poll for receipts finds whole
                # files only. A file precedes its receipt in the sorted order of names.
                while size:
                    self._stop_if_abandoned()
                    block = buffer[: min(size, BLOCK_BYTES)]
                    dist.recv(block, leader, group=self._group)
                    self.num_blocks += 1
                    content = block.numpy().data
                    checksum = zlib.crc32(content, checksum)
                    file.write(content)
                    size -= len(block)
                    unflushed += len(block)
                    if unflushed >= FLUSH_BYTES:
                        file.flush()
                        os.fdatasync(file.fileno())
                        unflushed = 0
            checksums[name] = checksum
        return checksums

    def _stop_if_abandoned(self) -> None:
        """Raise an error if another thread has failed."""
        if self._is_abandoned.is_set():
            raise CheckpointError("receiving was given up: the version cannot be completed")

    def _send_bytes(self, data: bytes) -> None:
        """Send the length, then the bytes."""
        self._send(torch.tensor([len(data)]))
        self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _send(self, values: torch.Tensor) -> None:
        """Send to the first machine."""
        self.num_blocks += 1
        dist.send(values, 0, group=self._group)

    def _receive_bytes(self, leader: int) -> bytes:
        """Receive the bytes of :meth:`_send_bytes`, after any number of heartbeats."""
        # A heartbeat and a length have the same shape and dtype: the receiver cannot tell them apart before
        # it has the value.
        length = torch.full((1,), STILL_WRITING, dtype=torch.int64)
        while int(length) == STILL_WRITING:
            self._stop_if_abandoned()
            dist.recv(length, leader, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(data, leader, group=self._group)
        return data.numpy().tobytes()


def empty_outbox(checkpoint: Path, rank: int) -> Path:
    """Make the empty outbox folder of a machine, beside the checkpoint's folder.

    Raises
    ------
    CheckpointError
        If it may not be written to.
    StorageError
        If the disk is full or fails.
    """
    outbox = checkpoint.with_name(layout.outbox_folder(rank))
    try:
        shutil.rmtree(outbox, ignore_errors=True)
        outbox.mkdir(parents=True)
    except OSError as error:
        raise write_error(f"cannot write to {outbox}", error) from error
    return outbox
