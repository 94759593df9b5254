"""The launcher's folder as the store of a run whose machines share no disk.

A trainer (:class:`LauncherStore`) sends requests over a socket to its node program, which passes them on over
its stream, and the launcher (:class:`RunFolder`) answers them. Files go in blocks, each of which is answered
before the next: a slow disk or network slows the writer down, and nothing else.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dglkge.checkpoint import layout
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.checkpoint.stores import FileStore, Store
from dglkge.distributed.lease import Lease, boot_id, new_nonce
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.distributed.world import OWN_DISKS_VARIABLE
from dglkge.errors import CheckpointError, InputError, NotReadyError, StorageError, os_errors
from dglkge.launch.remote import protocol
from dglkge.launch.remote.file_transfer import BLOCK_BYTES, inner_path, read_block, write_block
from dglkge.launch.remote.protocol import STORE_VARIABLE, Call, Reply, answer

ANSWER_SECONDS = 60.0

_POINTER = f"{layout.CHECKPOINT_FOLDER}/{layout.VERSION_FILE}"


class RunFolder(FileStore):
    """Answers requests for the files of a run's folder on this machine; other machines write nowhere else."""

    def __init__(self, folder: Path, lease: Lease) -> None:
        folder = folder.resolve()
        super().__init__(f"file://{folder}")
        self._lease = lease
        self._tasks: dict[str, Callable[..., Any]] = {
            "identity": lambda: {"place": f"{socket.gethostname()}:{folder}", "same": identity(folder)},
            "get": lambda name, start: read_block(self._path(name), start),
            "put": self._put, "copy": self.copy, "sizes": self.sizes, "remove": self.remove,
        }  # fmt: skip

    def answer(self, call: Call) -> Reply:
        """Answer a request; the number of an operating system's error is the value of its reply."""
        return answer(call, self._tasks)

    def _path(self, name: str) -> Path:
        return Path(inner_path(str(self._folder), name))

    def _put(self, name: str, token: str, start: int, is_last: bool, data: bytes = b"") -> None:
        """Write some bytes of a file, which gets its name with the last of them."""
        if name == layout.LEASE_FILE or not token.isalnum():
            raise InputError(f"{name!r} is no file of a run")
        path = self._path(name)
        self._lease.check()
        if start == 0 and is_last and name == _POINTER:
            CheckpointStorage(path.parent, self._lease).publish(int(data))
        else:
            write_block(path, token, start, is_last, data, lease=self._lease)

    def copy(self, name: str, target: str) -> None:
        source, path = self._path(name), self._path(target)
        source.stat()  # raises FileNotFoundError
        path.parent.mkdir(parents=True, exist_ok=True)
        LeasedFolder(path.parent, self._lease).link_or_copy(source, path.name)

    def remove(self, name: str) -> None:
        self._lease.check()
        super().remove(name)


class LauncherStore(Store):
    """The launcher's folder of a run, as a store; see :class:`dglkge.checkpoint.stores.Store`.

    Requests go through the node program that started this process. If `output`, the run's folder here, is the
    launcher's, its files are there already.

    Raises
    ------
    InputError
        If no node program has started this process for it.
    NotReadyError
        If the launcher does not answer.
    """

    def __init__(self, output: Path) -> None:
        name = os.environ.get(STORE_VARIABLE, "")
        if not name:
            words = "is set, but dglkge-launch --sync did not start this process"
            raise InputError(f"{OWN_DISKS_VARIABLE} {words}")
        self.num_bytes = 0
        self._numbers = itertools.count()
        self._one_at_a_time = threading.Lock()
        self._received = bytearray()
        self._connection = socket.socket(socket.AF_UNIX)
        with os_errors(NotReadyError, "the launcher does not answer"):
            self._connection.connect(f"\0{name}")
            facts, _ = self._ask("identity")
        self.url = str(facts["place"])
        self._is_same = output.is_dir() and facts["same"] == identity(output)

    def read(self, name: str) -> bytes:
        return b"".join(self._blocks(name))

    def write(self, name: str, content: bytes) -> None:
        self._put(name, io.BufferedReader(io.BytesIO(content)))

    def upload(self, path: Path, name: str) -> None:
        if self._is_same:
            return
        with open(path, "rb") as file:
            self._put(name, file)

    def download(self, name: str, path: Path) -> None:
        with open(path, "wb") as file:
            file.writelines(self._blocks(name))

    def copy(self, name: str, target: str) -> None:
        if not self._is_same:
            self._ask("copy", name=name, target=target)

    def sizes(self, folder: str) -> dict[str, int]:
        return dict(self._ask("sizes", folder=folder)[0])

    def remove(self, name: str) -> None:
        self._ask("remove", name=name)

    def _blocks(self, name: str) -> Iterator[bytes]:
        start, is_last = 0, False
        while not is_last:
            (is_last, _), block = self._ask("get", name=name, start=start)
            start += len(block)
            yield block

    def _put(self, name: str, file: io.BufferedReader) -> None:
        token, start, is_last = new_nonce(), 0, False
        while not is_last:  # an empty file has one block
            block = file.read(BLOCK_BYTES)
            is_last = not file.peek(1)
            self._ask("put", block, name=name, token=token, start=start, is_last=is_last)
            self.num_bytes += len(block)
            start += len(block)

    def _ask(self, task: str, data: bytes = b"", **arguments: Any) -> tuple[Any, bytes]:
        """Send a request and return the answer; raises OSError, or what a refusal by the launcher means."""
        call = Call(task, arguments, data, next(self._numbers))
        with self._one_at_a_time:
            # No limit: half a request would make the next ones unreadable. A lost launcher ends this process.
            self._connection.settimeout(None)
            self._connection.sendall(protocol.encode(call))
            self._connection.settimeout(ANSWER_SECONDS)
            reply = self._receive(call)
        if reply.error is not None and isinstance(reply.value, int):
            raise OSError(reply.value, os.strerror(reply.value))
        reply.check(CheckpointError, StorageError)
        return reply.value, reply.data

    def _receive(self, call: Call) -> Reply:
        """Return the reply to a call; one to an earlier call came too late."""
        while True:
            message = protocol.take_message(self._received)
            if isinstance(message, Reply) and message.id == call.id:
                return message
            if message is None:
                received = self._connection.recv(protocol.BLOCK_BYTES)
                if not received:
                    raise ConnectionError(errno.ECONNRESET, "the node program has ended")
                self._received += received


def identity(folder: Path) -> list[Any]:
    """Return what is equal for two paths on one kernel that lead to the same folder."""
    status = os.stat(folder)
    return [boot_id(), status.st_dev, status.st_ino]
