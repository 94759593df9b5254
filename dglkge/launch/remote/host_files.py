"""Files on one machine as the launcher's agent sees and places them; the launcher uses the same here."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from dglkge.errors import InputError

STAGING_PREFIX = ".dglkge-sync-"
FileState = tuple[str, int, int]
"""Name in its folder, bytes, and whole seconds of its last change, which tar keeps."""


def list_files(folder: str) -> list[FileState]:
    """Return the state of all files below a folder; none where there is no such folder."""
    return [state for name in names_below(folder) if (state := file_state(folder, name)) is not None]


def stale_files(folder: str, wanted: Sequence[FileState]) -> list[str]:
    """Return the names of wanted files that a folder has not, or has in another state."""
    return [name for name, *state in wanted if file_state(folder, name) != (name, *state)]


def make_staging(folder: str) -> str:
    """Make a folder inside another one, so on the same disk, to unpack files in; drop what broken syncs left.

    Raises
    ------
    InputError
        If there is no right or no room to.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        for left in Path(folder).glob(STAGING_PREFIX + "*"):
            shutil.rmtree(left, ignore_errors=True)
        return tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=folder)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from None


def place_folder(folder: str) -> None:
    """Make a folder.

    Raises
    ------
    InputError
        If that is not possible.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}") from None


def place_files(folder: str, staging: str, last: Sequence[str] = (), keep: Collection[str] = ()) -> None:
    """Bring unpacked files to the disk and to their places, each in one step.

    Parameters
    ----------
    folder : str
        Where they go.
    staging : str
        Where they were unpacked; it is gone afterwards.
    last : sequence of str
        Names that come after all others: what says that the others count.
    keep : collection of str
        If not empty, files with other names below the folder are removed at the end.
    """
    names = sorted(names_below(staging), key=lambda name: (name in last, name))
    for name in names:
        _sync(os.path.join(staging, name))
        target = os.path.join(folder, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(os.path.join(staging, name), target)
        _sync(os.path.dirname(target))
    shutil.rmtree(staging)
    if keep:
        remove_others(folder, keep)


def remove_others(folder: str, keep: Collection[str]) -> None:
    """Remove all files below a folder but some."""
    for name in set(names_below(folder)) - set(keep):
        os.unlink(os.path.join(folder, name))


def names_below(folder: str) -> Iterator[str]:
    """Yield the names of all files and links below a folder, apart from what is being copied there."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(STAGING_PREFIX))
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in sorted([*files, *links]):
            yield os.path.relpath(os.path.join(parent, name), folder)


def file_state(folder: str, name: str) -> FileState | None:
    """Return the state of one file, of a link itself; None where there is none."""
    try:
        found = os.lstat(os.path.join(folder, name))
    except OSError:
        return None
    return name, found.st_size, int(found.st_mtime)


def _sync(path: str) -> None:
    """Bring a file or folder to the disk."""
    if os.path.islink(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
