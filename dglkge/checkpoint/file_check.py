"""Whether a file of a version is as its manifest says."""

from __future__ import annotations

from pathlib import Path

from dglkge.checkpoint import hdf5_format
from dglkge.checkpoint.manifest import UNKNOWN_CRC32, FileEntry
from dglkge.errors import CheckpointError


def check_file(folder: Path, entry: FileEntry, checksum: bool = False) -> None:
    """Check that a file is there and has its size and, when asked, its checksum.

    Raises
    ------
    CheckpointError
        If it is not as it was written.
    """
    path = folder / entry.name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    if size != entry.size_bytes:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, expected {entry.size_bytes}")
    if checksum and entry.crc32 != UNKNOWN_CRC32:
        check_crc32(folder, entry, hdf5_format.file_crc32(path))


def check_crc32(folder: Path, entry: FileEntry, crc32: int) -> None:
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
