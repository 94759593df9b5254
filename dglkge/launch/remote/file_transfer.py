"""Copies files to a machine and back, in blocks over its stream; each is replaced in one step."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dglkge.checkpoint.layout import is_transient
from dglkge.distributed.lease import new_nonce
from dglkge.errors import InputError
from dglkge.launch.background import in_thread
from dglkge.launch.connection import NodeConnection
from dglkge.launch.remote import host_files

COMPARE_SECONDS = 300.0
SLOWEST_DISK_BYTES_PER_SECOND = 10e6
"""Write rate that timeouts of fsync allow for; heartbeats detect a lost connection sooner."""

STALL_SECONDS = 300.0
"""Timeout of one block: a blocked disk never fails by itself."""


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
        return await _in_time(session, host_files.read_block, tree.here, name, start)

    async def write(name: str, start: int, attributes: Sequence[int] | None, data: bytes) -> None:
        # The machine flushes the whole file to its disk before it answers the last block.
        seconds = STALL_SECONDS + start / SLOWEST_DISK_BYTES_PER_SECOND
        block = {"name": name, "copy": copy, "start": start, "attributes": attributes, "data": data}
        await session.call("write_block", seconds, folder=tree.there, **block)

    await _copy(stale, read, write)
    return len(stale)


def _states(tree: Tree) -> list[host_files.FileState]:
    """Return the states of the local files."""
    states = [(name, host_files.file_state(tree.here, name)) for name in tree.names]
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
    stale = await _in_time(session, host_files.stale_files, here, expected)
    copy = new_nonce()

    async def read(name: str, start: int) -> tuple[Any, bytes]:
        return await session.call_for_data("read_block", STALL_SECONDS, folder=there, name=name, start=start)

    async def write(name: str, start: int, attributes: Sequence[int] | None, data: bytes) -> None:
        await _in_time(session, host_files.write_block, here, name, copy, start, attributes, data, check)

    try:
        await _copy(stale, read, write)
    finally:
        host_files.abandon_copy(here, copy)
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
