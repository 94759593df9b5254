"""Copies files to a machine and back, in blocks over its stream; each is replaced in one step.

The first functions work on the files of one machine, for its node program and for the launcher's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dglkge.checkpoint.layout import is_transient
from dglkge.distributed.lease import new_nonce
from dglkge.errors import InputError, os_errors
from dglkge.launch.background import in_thread
from dglkge.launch.connection import NodeConnection

BLOCK_BYTES = 1 << 20
"""Small enough that heartbeats on the same stream are not late on a slow network."""

UNFINISHED_PREFIX = ".dglkge-sync-"
SMALL_FILE_BYTES = 1 << 20
"""Files up to this size are compared by content: two of one second and size may differ."""

COMPARE_SECONDS = 300.0
SLOWEST_DISK_BYTES_PER_SECOND = 10e6
"""Write rate that timeouts of fsync allow for; heartbeats detect a lost connection sooner."""

STALL_SECONDS = 300.0
"""Timeout of one block: a blocked disk never fails by itself."""


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
                if stat.S_ISREG(get_status(path).st_mode) and not name.startswith(UNFINISHED_PREFIX):
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
    """Return the states of all files below a folder; empty if it does not exist."""
    return [state for name in file_names(folder) if (state := file_state(folder, name)) is not None]


def stale_files(folder: str, expected: Sequence[Sequence[Any]]) -> list[str]:
    """Return the names of files that are absent in a folder or have another state than expected."""
    states = (FileState(*state) for state in expected)  # lists, if they come as JSON
    return [state.name for state in states if file_state(folder, state.name) != state]


def read_block(folder: str, name: str, start: int) -> tuple[tuple[bool, tuple[int, int]], bytes]:
    """Return a block of a file, whether it is the last one, and the file's mode and time of its last change.

    Raises
    ------
    InputError
        If it cannot be read.
    """
    path = os.path.join(folder, name)
    with os_errors(InputError, f"cannot read {path}"), open(path, "rb") as file:
        file.seek(start)
        data = file.read(BLOCK_BYTES)
        status = os.fstat(file.fileno())
        # A file that grows meanwhile, such as a log, ends where it ends now.
        return (not file.read(1), (stat.S_IMODE(status.st_mode), status.st_mtime_ns)), data


def write_block(
    folder: str,
    name: str,
    copy: str,
    start: int,
    attributes: Sequence[int] | None,
    data: bytes = b"",
    check: Callable[[], object] | None = None,
) -> None:
    """Write a block of a file, which gets its name with the last one.

    Parameters
    ----------
    folder : str
        Created with the first block.
    name : str
        In the folder.
    copy : str
        Id of the copy, which writes one file after the other.
    start : int
        Place of the block in the file.
    attributes : sequence of int or None
        Mode, and time of the last change in nanoseconds, with the last block.
    data : bytes
    check : callable, optional
        For files of another machine, which may not lead out of the folder: called before the file gets its
        name, and raises if it must not.

    Raises
    ------
    InputError
        If the file cannot be written, or its name leads out of the folder.
    """
    target = os.path.join(folder, name) if check is None else inner_path(folder, name)
    unfinished = _unfinished_file(folder, copy)
    try:
        if start == 0:
            os.makedirs(folder, exist_ok=True)
            _remove_unfinished(folder)
        with open(unfinished, "r+b" if start else "wb") as file:
            file.seek(start)
            file.write(data)
            if attributes is None:
                return
            # Content first, then the name, then the folder: after a power failure no name is without content.
            file.flush()
            os.fchmod(file.fileno(), attributes[0])
            os.utime(file.fileno(), ns=(attributes[1], attributes[1]))
            os.fsync(file.fileno())
        if check is not None:
            check()
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(unfinished, target)
        parent = os.open(os.path.dirname(target), os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)
    except OSError as error:
        abandon_copy(folder, copy)
        raise InputError(f"cannot write {target}: {error.strerror}") from None


def abandon_copy(folder: str, copy: str) -> None:
    """Remove the file that a copy has not finished, if there is one."""
    with contextlib.suppress(OSError):
        os.unlink(_unfinished_file(folder, copy))


def _unfinished_file(folder: str, copy: str) -> str:
    """Return the path of the file that a copy writes to: of this machine and process, to find those left."""
    return os.path.join(folder, f"{UNFINISHED_PREFIX}{socket.gethostname()}-{os.getpid()}-{copy}")


def _remove_unfinished(folder: str) -> None:
    """Remove what interrupted copies have left: unfinished files of ended processes of this machine."""
    prefix = f"{UNFINISHED_PREFIX}{socket.gethostname()}-"
    for path in Path(folder).glob(f"{prefix}*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        if not pid.isdecimal() or not psutil.pid_exists(int(pid)):
            path.unlink(missing_ok=True)


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
    copy = new_nonce()

    async def read(name: str, start: int) -> tuple[Any, bytes]:
        return await _in_time(session, read_block, tree.here, name, start)

    async def write(name: str, start: int, attributes: Sequence[int] | None, data: bytes) -> None:
        # The machine flushes the whole file to its disk before it answers the last block.
        seconds = STALL_SECONDS + start / SLOWEST_DISK_BYTES_PER_SECOND
        block = {"name": name, "copy": copy, "start": start, "attributes": attributes, "data": data}
        await session.call("write_block", seconds, folder=tree.there, **block)

    await _copy(stale, read, write)
    return len(stale)


def _states(tree: Tree) -> list[FileState]:
    """Return the states of the local files."""
    states = [(name, file_state(tree.here, name)) for name in tree.names]
    for name, state in states:
        if state is None:
            raise InputError(f"cannot send {Path(tree.here, name)}: there is no such file")
    return [state for _, state in states if state is not None]


async def fetch(
    session: NodeConnection,
    there: str,
    here: str,
    is_wanted: Callable[[str], bool],
    check: Callable[[], object] = lambda: None,
) -> int:
    """Copy the finished files of a folder from a machine, except those that exist here already.

    Parameters
    ----------
    session : NodeConnection
    there, here : str
        The folder on the machine; the local folder.
    is_wanted : callable
        Whether a file is copied, given its name.
    check : callable
        Called before each file gets its name; an exception prevents it.

    Returns
    -------
    int
        Number of files that were copied.

    Raises
    ------
    InputError
        If the machine cannot be reached, or there is no room here.
    """
    if _is_same_folder(session, here, there):
        return 0
    # An unfinished file would be gone by the time at which it is read.
    expected = [
        state
        for state in await session.call("list_files", COMPARE_SECONDS, folder=there)
        if is_wanted(state[0]) and not is_transient(Path(state[0]).name)
    ]
    stale = await _in_time(session, stale_files, here, expected)
    copy = new_nonce()

    async def read(name: str, start: int) -> tuple[Any, bytes]:
        return await session.call_for_data("read_block", STALL_SECONDS, folder=there, name=name, start=start)

    async def write(name: str, start: int, attributes: Sequence[int] | None, data: bytes) -> None:
        await _in_time(session, write_block, here, name, copy, start, attributes, data, check)

    try:
        await _copy(stale, read, write)
    finally:
        abandon_copy(here, copy)
    return len(stale)


def _is_same_folder(session: NodeConnection, here: str, there: str) -> bool:
    """Whether both are one folder of this machine, whose files would be replaced by themselves."""
    return session.is_here and os.path.realpath(here) == os.path.realpath(there)


async def _copy(
    names: Sequence[str],
    read: Callable[[str, int], Awaitable[tuple[Any, bytes]]],
    write: Callable[[str, int, Sequence[int] | None, bytes], Awaitable[None]],
) -> None:
    """Copy files block by block."""
    for name in names:
        start, is_last = 0, False
        while not is_last:
            (is_last, attributes), data = await read(name, start)
            await write(name, start, attributes if is_last else None, data)
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
