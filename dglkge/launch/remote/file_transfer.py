"""Copies files to a machine and back, in blocks over its stream; each is replaced in one step.

The first functions work on the files of one machine, for its node program and for the launcher's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import stat
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dglkge.checkpoint.layout import TEMPORARY_SUFFIX, is_temporary_of_a_job, temporary_file
from dglkge.distributed.lease import Lease, new_nonce
from dglkge.distributed.leased_folder import sync
from dglkge.errors import InputError, os_errors
from dglkge.launch.background import in_thread
from dglkge.launch.remote.connection import NodeConnection

BLOCK_BYTES = 1 << 20
"""Small enough that heartbeats on the same stream are not late on a slow network."""

SMALL_FILE_BYTES = 1 << 20
"""Files up to this size are compared by content: two of one second and size may differ."""

COMPARE_SECONDS = 300.0
SLOWEST_DISK_BYTES_PER_SECOND = 10e6
"""Write rate that timeouts of fsync allow for; heartbeats detect a lost connection sooner."""

STALL_SECONDS = 300.0
"""Timeout of one block: a blocked disk never fails by itself."""

ABANDONED_SECONDS = 2 * STALL_SECONDS
"""An unfinished file to which nothing was written for this time belongs to a copy that was interrupted."""


class FileState(NamedTuple):
    """Name of a file in its folder, bytes, whole seconds of its last change, CRC-32 of a small file."""

    name: str
    num_bytes: int
    changed: int
    crc32: int


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


def file_state(folder: str, name: str) -> FileState | None:
    """Return the state of a file, or of what a link leads to; None if there is none."""
    path = Path(folder, name)
    try:
        status = path.stat()
        is_small = stat.S_ISREG(status.st_mode) and status.st_size <= SMALL_FILE_BYTES
        crc32 = zlib.crc32(path.read_bytes()) if is_small else 0
    except OSError:
        return None
    return FileState(name, status.st_size, int(status.st_mtime), crc32)


def list_files(folder: str) -> list[FileState]:
    """Return the states of all finished files below a folder; empty if it does not exist."""
    names = (name for name in file_names(folder) if not name.endswith(TEMPORARY_SUFFIX))
    return [state for name in names if (state := file_state(folder, name)) is not None]


def stale_files(folder: str, expected: Sequence[Sequence[Any]]) -> list[str]:
    """Return the names of files that are absent in a folder or have another state than expected.

    Removes what interrupted copies have left.
    """
    for parent in {Path(folder, state[0]).parent for state in expected}:
        for path in parent.glob(f"*{TEMPORARY_SUFFIX}"):
            with contextlib.suppress(OSError):
                is_old = path.stat().st_mtime < time.time() - ABANDONED_SECONDS
                if is_temporary_of_a_job(path.name) and is_old:
                    path.unlink()
    states = (FileState(*state) for state in expected)  # lists, if they come as JSON
    return [state.name for state in states if file_state(folder, state.name) != state]


def read_block(path: Path, start: int) -> tuple[tuple[bool, tuple[int, int]], bytes]:
    """Return a block of a file, whether it is the last one, and the file's mode and time of its last change.

    Raises
    ------
    OSError
        If it cannot be read.
    """
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

    Raises
    ------
    OSError
        If the file cannot be written.
    CheckpointError
        If the lease is lost.
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
        # Content first, then the name, then the folder: after a power failure no name is without content.
        sync(unfinished)
        if lease is not None:
            lease.check()
        os.replace(unfinished, path)
        sync(path.parent)


def send_block(folder: str, name: str, start: int) -> tuple[Any, bytes]:
    """Read a block of a file in a folder; raises InputError if it cannot be read."""
    path = Path(folder, name)
    with os_errors(InputError, f"cannot read {path}"):
        return read_block(path, start)


def take_block(folder: str, name: str, **block: Any) -> None:
    """Write a block of a file in a folder; raises InputError if it cannot be written."""
    path = Path(folder, name)
    with os_errors(InputError, f"cannot write {path}"):
        write_block(path, **block)


def inner_path(folder: str, name: str) -> str:
    """Return the path of a name in a folder.

    Raises
    ------
    InputError
        If the name, or a link below the folder, leads out of it.
    """
    parent = os.path.join(os.path.realpath(folder), os.path.dirname(name)).rstrip("/")
    is_plain = (
        name == os.path.normpath(name) and not os.path.isabs(name) and name.split("/")[0] not in ("..", ".")
    )
    if not is_plain or os.path.realpath(parent) != parent:
        raise InputError(f"the name {name!r} leads out of {folder}, or through a link in it")
    return os.path.join(folder, name)


def place_folder(folder: str) -> None:
    """Create a folder.

    Raises
    ------
    InputError
        If that is not possible.
    """
    with os_errors(InputError, f"cannot make the folder {folder}"):
        os.makedirs(folder, exist_ok=True)


@dataclass(frozen=True)
class Tree:
    """Some files of a local folder, to be copied to a folder on a machine.

    Attributes
    ----------
    here, there : str
    names : tuple of str
        Relative to both.
    """

    here: str
    there: str
    names: tuple[str, ...]


async def send(session: NodeConnection, tree: Tree) -> int:
    """Copy files to a machine, except those that it has already; of a link, the file that it leads to.

    Parameters
    ----------
    session : NodeConnection
    tree : Tree

    Returns
    -------
    int
        Number of files that were copied.

    Raises
    ------
    InputError
        If the machine cannot be reached or cannot take them.
    """
    if _is_same_folder(session, tree.here, tree.there):
        return 0
    expected = await _in_time(session, _states, tree)
    stale = await session.call("stale_files", COMPARE_SECONDS, folder=tree.there, expected=expected)

    async def read(name: str, start: int) -> tuple[Any, bytes]:
        return await _in_time(session, send_block, tree.here, name, start)

    async def write(name: str, start: int, **block: Any) -> None:
        # The machine flushes the whole file to its disk before it answers the last block.
        seconds = STALL_SECONDS + start / SLOWEST_DISK_BYTES_PER_SECOND
        await session.call("take_block", seconds, folder=tree.there, name=name, start=start, **block)

    await _copy(stale, read, write, new_nonce())
    return len(stale)


def _states(tree: Tree) -> list[FileState]:
    """Return the states of the local files."""
    states = [(name, file_state(tree.here, name)) for name in tree.names]
    for name, state in states:
        if state is None:
            raise InputError(f"cannot send {Path(tree.here, name)}: there is no such file")
    return [state for _, state in states if state is not None]


async def fetch(session: NodeConnection, there: str, here: str) -> int:
    """Copy the finished files of a folder from a machine, except those that exist here already.

    Parameters
    ----------
    session : NodeConnection
    there, here : str
        The folder on the machine; the local folder.

    Returns
    -------
    int
        Number of files that were copied.

    Raises
    ------
    InputError
        If the machine cannot be reached, or a file cannot be written here.
    """
    if _is_same_folder(session, here, there):
        return 0
    expected = await session.call("list_files", COMPARE_SECONDS, folder=there)
    for name, *_ in expected:
        inner_path(here, name)  # a machine writes nowhere else
    stale = await _in_time(session, stale_files, here, expected)

    async def read(name: str, start: int) -> tuple[Any, bytes]:
        return await session.call_for_data("send_block", STALL_SECONDS, folder=there, name=name, start=start)

    async def write(name: str, start: int, **block: Any) -> None:
        await _in_time(session, functools.partial(take_block, here, name, start=start, **block))

    token = new_nonce()
    try:
        await _copy(stale, read, write, token)
    finally:
        for path in Path(here).rglob(temporary_file("*", token)):
            path.unlink(missing_ok=True)
    return len(stale)


def _is_same_folder(session: NodeConnection, here: str, there: str) -> bool:
    """Whether both are one folder of this machine, whose files would be replaced by themselves."""
    return session.is_here and os.path.realpath(here) == os.path.realpath(there)


async def _copy(
    names: Sequence[str],
    read: Callable[[str, int], Awaitable[tuple[Any, bytes]]],
    write: Callable[..., Awaitable[None]],
    token: str,
) -> None:
    """Copy files block by block."""
    for name in names:
        start, is_last = 0, False
        while not is_last:
            (is_last, attributes), data = await read(name, start)
            await write(name, start, token=token, is_last=is_last, data=data, attributes=attributes)
            start += len(data)


async def _in_time(session: NodeConnection, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that uses a disk of this machine, which may be blocked, for at most STALL_SECONDS."""
    try:
        return await asyncio.wait_for(in_thread(function, *arguments), STALL_SECONDS)
    except asyncio.TimeoutError:
        raise InputError(
            f"files could not be copied from or to {session.address}: nothing moved for {STALL_SECONDS:g} s; "
            "is a disk blocked?"
        ) from None
