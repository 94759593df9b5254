"""Copies files to a machine and back: tar over ssh into a staging folder, then renamed into their places."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from dglkge.checkpoint.layout import is_transient
from dglkge.errors import InputError
from dglkge.launch.connection import NodeConnection
from dglkge.launch.remote.host_files import (
    FileState,
    file_state,
    list_files,
    make_staging,
    place_files,
    remove_others,
    stale_files,
)

COMPARE_SECONDS = 300.0
PLACE_SECONDS = 600.0
SLOWEST_DISK_BYTES_PER_SECOND = 10e6
"""Write rate that timeouts of renaming and fsync allow for; heartbeats detect a lost connection sooner."""

STALL_SECONDS = 300.0
"""Timeout without progress of a copy: a blocked disk never fails by itself."""

BLOCK_BYTES = 1 << 20
REAP_SECONDS = 5.0

LONGEST_REASON = 300
CANCEL_POLL_SECONDS = 0.5
CANCELLED = "the transfer was cancelled"


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


def send(session: NodeConnection, tree: Tree, last: Sequence[str] = (), is_mirror: bool = False) -> int:
    """Copy files to a machine, except those that it has already.

    Parameters
    ----------
    session : NodeConnection
    tree : Tree
    last : sequence of str
        Names that are renamed into their places after all others.
    is_mirror : bool
        Whether other files in the folder there are removed.

    Returns
    -------
    int
        Number of files that were copied.

    Raises
    ------
    InputError
        If the machine cannot be reached or cannot take them.
    """
    # On this machine both may be the same folder: unpacking there would replace files by themselves.
    if session.transport is None and Path(tree.here).resolve() == Path(tree.there).resolve():
        return 0
    wanted = _states(tree)
    stale = _with_last(
        session.call("stale_files", COMPARE_SECONDS, folder=tree.there, wanted=wanted), wanted, last
    )
    if stale or is_mirror:
        # Unpacked beside the target and renamed: an interrupted copy never leaves a half-written file.
        staging = session.call("make_staging", folder=tree.there)
        _pipe(_pack(tree.here), session.command(_unpack(staging)), stale, session)
        keep = list(tree.names) if is_mirror else []
        question = {"folder": tree.there, "staging": staging, "last": list(last), "keep": keep}
        missing = set(stale)
        num_bytes = sum(size for name, size, *_ in wanted if name in missing)
        # The timeout grows with the size: the machine flushes each file to its disk before it replies.
        session.call("place_files", PLACE_SECONDS + num_bytes / SLOWEST_DISK_BYTES_PER_SECOND, **question)
    return len(stale)


def fetch(
    session: NodeConnection,
    there: str,
    here: str,
    last: Sequence[str] = (),
    skip: Sequence[str] = (),
    dropped_in: str | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
    check: Callable[[], object] = lambda: None,
) -> int:
    """Copy the finished files of a folder from a machine, except those that exist here already.

    Parameters
    ----------
    session : NodeConnection
    there, here : str
        The folder on the machine; the local folder.
    last : sequence of str
        Names that are renamed into their places after all others.
    skip : sequence of str
        Names that are not copied.
    dropped_in : str, optional
        A folder in it where local files that the machine no longer has are removed.
    is_cancelled : callable
        Whether to cancel; then nothing has changed here.
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
    if session.transport is None and Path(there).resolve() == Path(here).resolve():
        return 0
    found = session.call("list_files", COMPARE_SECONDS, folder=there)
    # An unfinished file would be gone by the time at which tar reads it.
    wanted: list[FileState] = [
        tuple(state) for state in found if state[0] not in skip and not is_transient(Path(state[0]).name)
    ]
    stale = _with_last(stale_files(here, wanted), wanted, last)
    if stale:
        if session.is_cut or is_cancelled():
            raise InputError(CANCELLED)
        staging = make_staging(here)
        try:
            _pipe(session.command(_pack(there)), _unpack(staging), stale, session, is_cancelled)
            # The last moment at which nothing has changed here.
            check()
            place_files(here, staging, last)
            if dropped_in is not None:
                mark = dropped_in + "/"
                below = [name[len(mark) :] for name, *_ in wanted if name.startswith(mark)]
                remove_others(str(Path(here, dropped_in)), below)
        except OSError as error:
            raise InputError(f"files from {session.address} cannot be placed in {here}: {error}") from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return len(stale)


def files_below(folder: Path) -> tuple[str, ...]:
    """Return the names of all files below a folder."""
    return tuple(name for name, *_ in list_files(str(folder)))


def _with_last(stale: Sequence[str], wanted: Sequence[FileState], last: Sequence[str]) -> list[str]:
    """Add the names that come last: version files of the same second have equal sizes and times."""
    present = {name for name, *_ in wanted}
    return [*stale, *(name for name in last if name in present and name not in stale)]


def _states(tree: Tree) -> list[FileState]:
    """Return the states of the local files."""
    found = [(name, file_state(tree.here, name)) for name in tree.names]
    missing = [name for name, state in found if state is None]
    if missing:
        raise InputError(f"cannot send {Path(tree.here, missing[0])}: there is no such file")
    return [state for _, state in found if state is not None]


def _pack(folder: str) -> list[str]:
    """Return the command that packs files whose names come from stdin."""
    # Names are separated by zero bytes and taken literally: they may contain line ends or begin with "-".
    return ["tar", "--create", "--directory", folder, "--null", "--verbatim-files-from", "--files-from=-"]


def _unpack(folder: str) -> list[str]:
    """Return the command that unpacks stdin."""
    # Users may have other numbers on the machine.
    return ["tar", "--extract", "--no-same-owner", "--directory", folder]


def _pipe(
    pack: list[str],
    unpack: list[str],
    names: Sequence[str],
    session: NodeConnection,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Pipe one command into the other; both must succeed, and bytes must move every STALL_SECONDS.

    The transfer is cancelled too when the session is cut: tar runs in processes of its own.
    """

    def must_stop() -> bool:
        return session.is_cut or is_cancelled()

    with tempfile.TemporaryFile() as listed, tempfile.TemporaryFile() as errors:
        # The list of names goes through a file: a pipe could fill up while tar already writes its output.
        listed.write(b"".join(name.encode(errors="surrogateescape") + b"\0" for name in names))
        listed.seek(0)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            packer = _start(pack, listed, subprocess.PIPE, errors, session)
            processes.append(packer)
            unpacker = _start(unpack, subprocess.PIPE, errors, errors, session)
            processes.append(unpacker)
            source, sink = cast(IO[bytes], packer.stdout), cast(IO[bytes], unpacker.stdin)
            _pump(source.fileno(), sink.fileno(), must_stop)
            with contextlib.suppress(OSError):
                sink.close()
            source.close()  # a packer that still writes gets SIGPIPE
            # The unpacker first: if it fails, the packer ends with SIGPIPE, which is only a consequence.
            statuses = [_await_exit(process, must_stop) for process in (unpacker, packer)]
        except (TimeoutError, subprocess.TimeoutExpired):
            raise InputError(
                f"files could not be copied from or to {session.address}: nothing moved for "
                f"{STALL_SECONDS:g} s; is a disk or the network blocked?"
            ) from None
        finally:
            for process in processes:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # in a call of a blocked disk
                    process.wait(REAP_SECONDS)
                for pipe in (process.stdin, process.stdout):
                    with contextlib.suppress(OSError):
                        if pipe is not None:
                            pipe.close()
        if any(statuses):
            errors.seek(0)
            words = " ".join(errors.read().decode(errors="replace").split())
            what = words[:LONGEST_REASON] or f"tar ended with status {max(statuses)}"
            raise InputError(f"files could not be copied from or to {session.address}: {what}")


def _start(
    command: list[str],
    stdin: int | IO[bytes],
    stdout: int | IO[bytes],
    errors: IO[bytes],
    session: NodeConnection,
) -> subprocess.Popen[bytes]:
    """Start one of the two commands.

    Raises
    ------
    InputError
        If its program is not on this machine.
    """
    try:
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=errors, bufsize=0)
    except OSError as error:
        raise InputError(
            f"files could not be copied from or to {session.address}: the launcher's machine cannot start "
            f"{command[0]!r}: {error.strerror}"
        ) from None


def _pump(source: int, sink: int, is_cancelled: Callable[[], bool]) -> None:
    """Copy one pipe to another until the end of either.

    Raises
    ------
    TimeoutError
        If nothing moves for STALL_SECONDS, however long the whole takes.
    InputError
        If the transfer is cancelled.
    """
    # Non-blocking: a write to a pipe that accepts less than a block would otherwise ignore the timeout.
    os.set_blocking(sink, False)
    while True:
        # tar may write nothing for a while: the limit is on the pause and not on the whole transfer.
        _await_ready([source], [], is_cancelled)
        block = memoryview(os.read(source, BLOCK_BYTES))
        if not block:
            return
        while block:
            _await_ready([], [sink], is_cancelled)
            try:
                block = block[os.write(sink, block) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:  # the unpacker's status and stderr give the reason
                return


def _await_exit(process: subprocess.Popen[bytes], is_cancelled: Callable[[], bool]) -> int:
    """Wait until a process has ended, for at most STALL_SECONDS; return its status."""
    deadline = time.monotonic() + STALL_SECONDS
    while not is_cancelled():
        try:
            return process.wait(min(CANCEL_POLL_SECONDS, STALL_SECONDS))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline:
                raise
    raise InputError(CANCELLED)


def _await_ready(sources: list[int], sinks: list[int], is_cancelled: Callable[[], bool]) -> None:
    """Wait until a pipe can be read or written."""
    deadline = time.monotonic() + STALL_SECONDS
    while not is_cancelled():
        if any(select.select(sources, sinks, [], min(CANCEL_POLL_SECONDS, STALL_SECONDS))):
            return
        if time.monotonic() >= deadline:
            raise TimeoutError
    raise InputError(CANCELLED)
