"""File operations of a copy on one machine, for its node program and for the launcher's own files."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dglkge.errors import InputError, os_errors

BLOCK_BYTES = 1 << 20
"""Small enough that heartbeats on the same stream are not late on a slow network."""

UNFINISHED_PREFIX = ".dglkge-sync-"
SMALL_FILE_BYTES = 1 << 20
"""Files up to this size are compared by content: two of one second and size may differ."""


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
