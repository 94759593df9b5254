"""Copies files to a machine and back, in blocks over its stream; a staging folder keeps unfinished ones."""

from __future__ import annotations

import functools
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dglkge.checkpoint.layout import is_transient
from dglkge.errors import InputError
from dglkge.launch.connection import CANCELLED, NodeConnection
from dglkge.launch.remote.host_files import (
    FileState,
    Piece,
    file_state,
    list_files,
    make_staging,
    place_files,
    read_block,
    stale_files,
    write_block,
)

COMPARE_SECONDS = 300.0
PLACE_SECONDS = 600.0
SLOWEST_DISK_BYTES_PER_SECOND = 10e6
"""Write rate that timeouts of renaming and fsync allow for; heartbeats detect a lost connection sooner."""

STALL_SECONDS = 300.0
"""Timeout of one block: a blocked disk never fails by itself."""

NAMES_OF_CALL = 1000


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


def send(session: NodeConnection, tree: Tree) -> int:
    """Copy files to a machine, except those that it has already.

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
    # On this machine both may be the same folder: its files would be replaced by themselves.
    if session.is_here and Path(tree.here).resolve() == Path(tree.there).resolve():
        return 0
    wanted = _states(tree)
    stale = session.call("stale_files", COMPARE_SECONDS, folder=tree.there, wanted=wanted)
    if stale:
        # Written beside the target and renamed: an interrupted copy never leaves a half-written file.
        staging = session.call("make_staging", folder=tree.there)
        read = functools.partial(_in_time, session, read_block, tree.here)

        def write(pieces: Sequence[Piece], data: bytes) -> None:
            session.call("write_block", STALL_SECONDS, folder=staging, pieces=pieces, data=data)

        _copy(read, write, stale, lambda: session.is_cut)
        question = {"folder": tree.there, "staging": staging}
        missing = set(stale)
        num_bytes = sum(size for name, size, *_ in wanted if name in missing)
        # The timeout grows with the size: the machine flushes each file to its disk before it replies.
        session.call("place_files", PLACE_SECONDS + num_bytes / SLOWEST_DISK_BYTES_PER_SECOND, **question)
    return len(stale)


def fetch(
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
        Called when all files are in the staging folder; an exception keeps them from their places.

    Returns
    -------
    int
        Number of files that were copied.

    Raises
    ------
    InputError
        If the machine cannot be reached, or there is no room here.
    """
    if session.is_here and Path(there).resolve() == Path(here).resolve():
        return 0
    # An unfinished file would be gone by the time at which it is read.
    wanted: list[FileState] = [
        tuple(state)
        for state in session.call("list_files", COMPARE_SECONDS, folder=there)
        if is_wanted(state[0]) and not is_transient(Path(state[0]).name)
    ]
    stale = stale_files(here, wanted)

    def must_stop() -> bool:
        return session.is_cut

    def read(names: Sequence[str], start: int) -> tuple[list[Piece], bytes]:
        question = {"folder": there, "names": names, "start": start}
        pieces, data = session.call_for_data("read_block", STALL_SECONDS, **question)
        return [Piece(*piece) for piece in pieces], data

    if stale:
        if must_stop():
            raise InputError(CANCELLED)
        staging = make_staging(here)
        try:
            _copy(read, functools.partial(_in_time, session, write_block, staging), stale, must_stop)
            # The last moment at which nothing has changed here.
            check()
            place_files(here, staging, is_confined=True)
        except OSError as error:
            raise InputError(f"files from {session.address} cannot be placed in {here}: {error}") from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return len(stale)


def _copy(
    read: Callable[[Sequence[str], int], tuple[list[Piece], bytes]],
    write: Callable[[Sequence[Piece], bytes], object],
    names: Sequence[str],
    is_cancelled: Callable[[], bool],
) -> None:
    """Copy files block by block; raises InputError if the copy is cancelled."""
    position, start = 0, 0
    while position < len(names):
        if is_cancelled():
            raise InputError(CANCELLED)
        pieces, data = read(names[position : position + NAMES_OF_CALL], start)
        write(pieces, data)
        last = pieces[-1]
        position += len(pieces) - (not last.is_last)
        start = 0 if last.is_last else last.offset + last.size


def _in_time(session: NodeConnection, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that uses a disk of this machine, which may be blocked, for at most STALL_SECONDS."""
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((function(*arguments), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = outcome.get(timeout=STALL_SECONDS)
    except queue.Empty:
        raise InputError(
            f"files could not be copied from or to {session.address}: nothing moved for {STALL_SECONDS:g} s; "
            "is a disk blocked?"
        ) from None
    if error is not None:
        raise error
    return value


def files_below(folder: Path) -> tuple[str, ...]:
    """Return the names of all files below a folder."""
    return tuple(name for name, *_ in list_files(str(folder)))


def _states(tree: Tree) -> list[FileState]:
    """Return the states of the local files."""
    found = [(name, file_state(tree.here, name)) for name in tree.names]
    missing = [name for name, state in found if state is None]
    if missing:
        raise InputError(f"cannot send {Path(tree.here, missing[0])}: there is no such file")
    return [state for _, state in found if state is not None]
