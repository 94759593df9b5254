"""Copies files to a machine and back, in blocks over its stream; each is replaced in one step."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dglkge.checkpoint.layout import TEMPORARY_SUFFIX, is_temporary_of_a_job, temporary_file
from dglkge.distributed.lease import Lease, new_nonce
from dglkge.distributed.leased_folder import put_in_place
from dglkge.errors import InputError, os_errors
from dglkge.launch.background import in_thread
from dglkge.launch.remote.connection import NodeConnection

BLOCK_BYTES = 1 << 20
"""Small enough that heartbeats on the same stream are not late on a slow network."""

SMALL_FILE_BYTES = 1 << 20
"""Files up to this size are compared by content: two of one second and size may differ."""

SLOWEST_DISK_BYTES_PER_SECOND = 10e6
"""Write rate that timeouts of fsync allow for; heartbeats detect a lost connection sooner."""

STALL_SECONDS = 300.0
"""Timeout of one block or comparison: a blocked disk never fails by itself."""

ABANDONED_SECONDS = 2 * STALL_SECONDS
"""An unfinished file to which nothing was written for this time belongs to a copy that was interrupted."""


def file_names(folder: str, follow_links: bool = False) -> Iterator[str]:
    """Yield the names of all regular files below a folder; links are what they lead to, or left out."""
    get_status = os.stat if follow_links else os.lstat
    for parent, folders, names in os.walk(folder, followlinks=follow_links):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            # A pipe or socket would block who opens it.
            with contextlib.suppress(OSError):
                if stat.S_ISREG(get_status(path).st_mode):
                    yield os.path.relpath(path, folder)


def file_state(folder: str, name: str) -> list[int] | None:
    """Return the state of a file, or of what a link leads to; None if there is none.

    It is its bytes, the whole seconds of its last change, and the CRC-32 of a small file.
    """
    path = Path(folder, name)
    try:
        status = path.stat()
        is_small = stat.S_ISREG(status.st_mode) and status.st_size <= SMALL_FILE_BYTES
        crc32 = zlib.crc32(path.read_bytes()) if is_small else 0
    except OSError:
        return None
    return [status.st_size, int(status.st_mtime), crc32]


def list_files(folder: str, names: Sequence[str] | None = None) -> dict[str, list[int]]:
    """Return the states of named files, or of all finished ones below a folder, which need not exist.

    Raises
    ------
    InputError
        If a named file is absent.
    """
    finished = (name for name in file_names(folder) if not name.endswith(TEMPORARY_SUFFIX))
    states = {}
    for name in finished if names is None else names:
        if (state := file_state(folder, name)) is not None:
            states[name] = state
        elif names is not None:
            raise InputError(f"cannot send {Path(folder, name)}: there is no such file")
    return states


def stale_files(folder: str, expected: Mapping[str, list[int]]) -> list[str]:
    """Return the names of files that are absent in a folder or have another state than expected.

    Removes what interrupted copies have left.
    """
    for parent in {Path(folder, name).parent for name in expected}:
        for path in parent.glob(f"*{TEMPORARY_SUFFIX}"):
            with contextlib.suppress(OSError):
                is_old = path.stat().st_mtime < time.time() - ABANDONED_SECONDS
                if is_temporary_of_a_job(path.name) and is_old:
                    path.unlink()
    return [name for name, state in expected.items() if file_state(folder, name) != state]


def read_block(path: Path, start: int) -> tuple[tuple[bool, tuple[int, int]], bytes]:
    """Return a block, whether it is the last one, and the file's mode and time of its last change."""
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(BLOCK_BYTES)
        status = os.fstat(file.fileno())
        # A file that grows meanwhile, such as a log, ends where it ends now.
        return (not file.read(1), (stat.S_IMODE(status.st_mode), status.st_mtime_ns)), data


def write_block(
    path: Path,
    token: str,
    start: int,
    is_last: bool,
    data: bytes = b"",
    attributes: Sequence[int] | None = None,
    lease: Lease | None = None,
) -> None:
    """Write a block of a file, which gets its name with the last one.

    Parameters
    ----------
    path : Path
        Its folder is created.
    token : str
        Nonce of the copy, which tells its unfinished file from those of others.
    start : int
        Place of the block in the file.
    is_last : bool
    data : bytes
    attributes : sequence of int or None
        Mode, and time of the last change in nanoseconds.
    lease : Lease, optional
        The right to write to the folder; it is read again before the file gets its name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(temporary_file(path.name, token))
    with open(unfinished, "r+b" if start else "wb") as file:
        file.seek(start)
        file.write(data)
    if is_last:
        if attributes is not None:
            os.chmod(unfinished, attributes[0])
            os.utime(unfinished, ns=(attributes[1], attributes[1]))
        put_in_place(unfinished, path, lease)


def inner_path(folder: str, name: str) -> str:
    """Return the path of a name in a folder; raises InputError if it, or a link, leads out of the folder."""
    parent = os.path.join(os.path.realpath(folder), os.path.dirname(name)).rstrip("/")
    is_plain = name == os.path.normpath(name) and name.split("/")[0] not in ("", "..", ".")
    if not is_plain or os.path.realpath(parent) != parent:
        raise InputError(f"the name {name!r} leads out of {folder}, or through a link in it")
    return os.path.join(folder, name)


def _task(verb: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Return a task on a path in a folder, whose failures say what could not be done."""

    def run(folder: str, name: str = "", **block: Any) -> Any:
        path = Path(folder, name)
        with os_errors(InputError, f"cannot {verb} {path}"):
            return work(path, **block)

    return run


TASKS: dict[str, Callable[..., Any]] = {
    "list_files": list_files,
    "stale_files": stale_files,
    "send_block": _task("read", read_block),
    "take_block": _task("write", write_block),
    "place_folder": _task("make the folder", lambda path: path.mkdir(parents=True, exist_ok=True)),
}
"""Work on the files of one machine, by its node program or in the launcher."""


async def copy_files(node: NodeConnection, here: str, there: str, names: Sequence[str] | None = None) -> int:
    """Copy files between a local folder and one on a machine, except those that are there already.

    Parameters
    ----------
    node : NodeConnection
    here, there : str
    names : sequence of str or None
        Files to copy to the machine; of a link the file that it leads to. None: all finished files of the
        machine's folder are copied from there.

    Returns
    -------
    int
        Number of files that were copied.

    Raises
    ------
    InputError
        If the machine cannot be reached, or a file cannot be read or written.
    """
    if node.is_here and os.path.realpath(here) == os.path.realpath(there):
        return 0  # one folder, whose files would be replaced by themselves

    async def remote(task: str, seconds: float = STALL_SECONDS, /, **arguments: Any) -> Any:
        return await node.call_for_data(task, seconds, folder=there, **arguments)

    async def local(task: str, _seconds: float = STALL_SECONDS, /, **arguments: Any) -> Any:
        work = in_thread(functools.partial(TASKS[task], here, **arguments))
        try:
            result = await asyncio.wait_for(work, STALL_SECONDS)
        except asyncio.TimeoutError:
            words = f"nothing moved for {STALL_SECONDS:g} s; is a disk blocked?"
            raise InputError(f"files could not be copied from or to {node.address}: {words}") from None
        return result if isinstance(result, tuple) else (result, b"")

    source, target = (remote, local) if names is None else (local, remote)
    token = new_nonce()
    expected, _ = await source("list_files", names=names)
    if names is None:
        for name in expected:
            inner_path(here, name)  # a machine writes nowhere else
    stale, _ = await target("stale_files", expected=expected)
    try:
        for name in stale:
            start, is_last = 0, False
            while not is_last:
                (is_last, attributes), data = await source("send_block", name=name, start=start)
                block = {"token": token, "start": start, "data": data, "attributes": attributes}
                # The whole file is flushed to the disk before the last block is answered.
                seconds = STALL_SECONDS + start / SLOWEST_DISK_BYTES_PER_SECOND
                await target("take_block", seconds, name=name, is_last=is_last, **block)
                start += len(data)
    finally:
        if names is None:
            for path in Path(here).rglob(temporary_file("*", token)):
                path.unlink(missing_ok=True)
    return len(stale)
