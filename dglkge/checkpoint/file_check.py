"""Whether a file of a version is as its manifest says."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dglkge.checkpoint import hdf5_format, layout
from dglkge.checkpoint.manifest import UNKNOWN_CRC32, FileEntry, TextEntry
from dglkge.errors import CheckpointError


def check_file(folder: Path, entry: FileEntry, checksum: bool = False) -> None:
    """Check that a file is there and has its size and, when asked, its checksum.

    Raises
    ------
    CheckpointError
        If it is not as it was written.
    """
    path = folder / entry.name
    with _failures_to_read(path):
        _check_size(path, entry, path.stat().st_size)
        if checksum and entry.crc32 != UNKNOWN_CRC32:
            check_crc32(folder, entry, hdf5_format.file_crc32(path))


def check_open_file(folder: Path, entry: FileEntry, file: BinaryIO) -> None:
    """Check the size and the checksum of a file that is open, and may have lost its name since.

    Raises
    ------
    CheckpointError
        If it is not as it was written.
    """
    with _failures_to_read(folder / entry.name):
        _check_size(folder / entry.name, entry, os.fstat(file.fileno()).st_size)
        if entry.crc32 != UNKNOWN_CRC32:
            check_crc32(folder, entry, hdf5_format.open_crc32(file))


def check_text(folder: Path, entry: TextEntry, version: int, checksum: bool = False) -> Path:
    """Check a text file of a version; return where it lies now.

    Raises
    ------
    CheckpointError
        If it is missing or not as it was written.
    """
    own, staged = folder / entry.name, folder / layout.staged_file(entry.name, version)
    for path in (staged, own, staged):  # it may be renamed in the meantime, there or back
        try:
            with open(path, "rb") as file:
                _check_size(path, entry, os.fstat(file.fileno()).st_size)
                if checksum:
                    check_crc32(folder, entry, hdf5_format.open_crc32(file))
                return path
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    raise CheckpointError(f"{own} is missing")


def is_there(folder: Path, entry: TextEntry) -> bool:
    """Tell whether a text lies in its place with its size; its checksum stays what it was."""
    path = folder / entry.name
    return path.is_file() and path.stat().st_size == entry.size_bytes


def describe_text(path: Path, name: str) -> TextEntry:
    """Describe a text file that was just written."""
    return TextEntry(name, path.stat().st_size, hdf5_format.file_crc32(path))


@contextlib.contextmanager
def _failures_to_read(path: Path) -> Iterator[None]:
    """Raise CheckpointError where the disk fails: an older version may be whole."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None


def _check_size(path: Path, entry: FileEntry | TextEntry, size: int) -> None:
    if size != entry.size_bytes:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, expected {entry.size_bytes}")


def check_crc32(folder: Path, entry: FileEntry | TextEntry, crc32: int) -> None:
    """Compare the checksum of a file that was read with the one of its manifest.

    Raises
    ------
    CheckpointError
        If they differ.
    """
    if crc32 != entry.crc32 != UNKNOWN_CRC32:
        raise CheckpointError(
            f"{folder / entry.name} is damaged: its checksum is not the one in the manifest"
        )
