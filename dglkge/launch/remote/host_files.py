"""File operations of a copy on one machine, for its node program and for the launcher's own files."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dglkge.errors import InputError

STAGING_PREFIX = ".dglkge-sync-"
FileState = tuple[str, int, int, int]
"""Name in its folder, bytes, whole seconds of its last change (which tar keeps), CRC-32 of a small file."""

SMALL_FILE_BYTES = 1 << 20
"""Files up to this size are compared by content: two of one second and size may differ."""


def list_files(folder: str) -> list[FileState]:
    """Return the states of all files below a folder; empty if it does not exist."""
    return [state for name in names_below(folder) if (state := file_state(folder, name)) is not None]


def stale_files(folder: str, wanted: Sequence[FileState]) -> list[str]:
    """Return the names of wanted files that are absent in a folder or have another state."""
    return [name for name, *state in wanted if file_state(folder, name) != (name, *state)]


BLOCK_BYTES = 4 << 20


class Piece(NamedTuple):
    """A part of a file in a block: name, where it begins, its bytes, and what the whole file has."""

    name: str
    offset: int
    size: int
    mode: int
    changed_ns: int
    link: str | None = None
    is_last: bool = True


def read_block(folder: str, names: Sequence[str], start: int = 0) -> tuple[list[Piece], bytes]:
    """Read up to BLOCK_BYTES of some files.

    Parameters
    ----------
    folder : str
    names : sequence of str
        In the folder, one at least.
    start : int
        Byte of the first file to begin at.

    Returns
    -------
    pieces : list of Piece
        Of the first files; of the last one it may be a part.
    data : bytes
        Their contents.

    Raises
    ------
    InputError
        If a file cannot be read.
    """
    pieces: list[Piece] = []
    data = bytearray()
    for name in names:
        path = os.path.join(folder, name)
        try:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                pieces.append(Piece(name, 0, 0, 0, status.st_mtime_ns, os.readlink(path)))
                continue
            with open(path, "rb") as file:
                file.seek(start)
                content = file.read(BLOCK_BYTES - len(data))
                # A file that grows meanwhile, such as a log, ends where it ends now.
                is_last = not file.read(1)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        mode = stat.S_IMODE(status.st_mode)
        pieces.append(Piece(name, start, len(content), mode, status.st_mtime_ns, None, is_last))
        data += content
        start = 0
        if not is_last or len(data) >= BLOCK_BYTES:
            break
    return pieces, bytes(data)


def write_block(folder: str, pieces: Sequence[Sequence[Any]], data: bytes = b"") -> None:
    """Write what :func:`read_block` has read into an empty folder and its subfolders.

    The other machine's names and links lead to nothing outside of the folder.

    Raises
    ------
    InputError
        If a name or link leads out of it.
    """
    position = 0
    for piece in (Piece(*fields) for fields in pieces):
        path = inner_path(folder, piece.name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if piece.link is not None:
            if not _stays_inside(os.path.join(os.path.dirname(piece.name), piece.link), piece.link):
                raise InputError(f"the link {piece.name} leads out of its folder, to {piece.link}")
            os.symlink(piece.link, path)
            continue
        with open(path, "r+b" if piece.offset else "xb") as file:
            file.seek(piece.offset)
            file.write(memoryview(data)[position : position + piece.size])
        position += piece.size
        if piece.is_last:
            os.chmod(path, piece.mode)
            os.utime(path, ns=(piece.changed_ns, piece.changed_ns))


def inner_path(folder: str, name: str) -> str:
    """Return the path of a name in a folder.

    Raises
    ------
    InputError
        If the name, or a link below the folder, leads out of it.
    """
    parent = os.path.join(os.path.realpath(folder), os.path.dirname(name)).rstrip("/")
    if not _stays_inside(name, name) or os.path.realpath(parent) != parent:
        raise InputError(f"the name {name!r} leads out of {folder}, or through a link in it")
    return os.path.join(folder, name)


def _stays_inside(path: str, name: str) -> bool:
    """Whether a relative name, which makes a path, has ".." at its begin only and leaves no folder by it."""
    parts = Path(name).parts
    climbs = [part == ".." for part in parts]
    is_plain = bool(parts) and not os.path.isabs(name) and climbs == sorted(climbs, reverse=True)
    return is_plain and os.path.normpath(path).split("/")[0] != ".."


def make_staging(folder: str) -> str:
    """Create a staging folder inside a folder, so on the same disk; remove those of interrupted copies.

    Raises
    ------
    InputError
        If permissions or space are missing.
    """
    own = f"{STAGING_PREFIX}{socket.gethostname()}-"
    try:
        os.makedirs(folder, exist_ok=True)
        for left in Path(folder).glob(own + "*"):
            # Copies from several machines are made side by side: those of living processes go on.
            pid = left.name.removeprefix(own).partition("-")[0]
            if not pid.isdecimal() or not psutil.pid_exists(int(pid)):
                shutil.rmtree(left, ignore_errors=True)
        return tempfile.mkdtemp(prefix=f"{own}{os.getpid()}-", dir=folder)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from None


def place_folder(folder: str) -> None:
    """Create a folder.

    Raises
    ------
    InputError
        If that is not possible.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}") from None


def place_files(
    folder: str,
    staging: str,
    is_confined: bool = False,
) -> None:
    """Sync unpacked files to the disk and rename them into their places, each atomically.

    Parameters
    ----------
    folder : str
        Their target.
    staging : str
        The staging folder; it is removed.
    is_confined : bool
        Whether files of another machine may not lead through links below the folder.
    """
    for name in sorted(names_below(staging)):
        # Content first, then the name, then the folder: after a power failure no name is without its content.
        _sync(os.path.join(staging, name))
        target = inner_path(folder, name) if is_confined else os.path.join(folder, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(os.path.join(staging, name), target)
        _sync(os.path.dirname(target))
    shutil.rmtree(staging)


def names_below(folder: str) -> Iterator[str]:
    """Yield the names of all files and links below a folder, without staging folders."""
    for parent, folders, files in os.walk(folder):
        # In place: os.walk descends into what is left in this list.
        folders[:] = sorted(name for name in folders if not name.startswith(STAGING_PREFIX))
        # os.walk lists links to folders as folders, and does not descend into them. Here they are copied as
        # links.
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in sorted([*files, *links]):
            yield os.path.relpath(os.path.join(parent, name), folder)


def file_state(folder: str, name: str) -> FileState | None:
    """Return the state of one file, or of a link itself; None if absent."""
    try:
        # The link itself: a checkpoint links to the folder of its newest version.
        found = os.lstat(os.path.join(folder, name))
    except OSError:
        return None
    return name, found.st_size, int(found.st_mtime), _small_crc32(os.path.join(folder, name), found)


def _small_crc32(path: str, found: os.stat_result) -> int:
    """Return the CRC-32 of a small regular file; 0 for any other, and for one that cannot be read."""
    if not stat.S_ISREG(found.st_mode) or found.st_size > SMALL_FILE_BYTES:
        return 0
    try:
        with open(path, "rb") as file:
            return zlib.crc32(file.read())
    except OSError:
        return 0


def _sync(path: str) -> None:
    """Call fsync for a file or folder."""
    if os.path.islink(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
