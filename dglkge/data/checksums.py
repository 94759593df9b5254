"""CRC-32 of the files of a data set folder: written with its description, compared when a job opens it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dglkge.data.dataset_files import DESCRIPTION, PARTITION_LOG, PARTITIONS, REPORT, part_of_folder
from dglkge.errors import InputError

BLOCK_BYTES = 4 << 20

NOT_DATA = (DESCRIPTION, REPORT, PARTITION_LOG)


def file_checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of each data file below a folder by relative path, computed in parallel.

    Raises
    ------
    InputError
        If a file cannot be read.
    """
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name not in NOT_DATA and not path.name.startswith(".")
    )
    return dict(zip([str(path.relative_to(folder)) for path in paths], _checksums(paths)))


def verify_files(folder: Path, checksums: Mapping[str, int]) -> None:
    """Compare the files of a data set with their checksums, in parallel; skip partitions that are not here.

    Raises
    ------
    InputError
        If a file is missing, cannot be read or differs.
    """
    partitions = folder / PARTITIONS
    elsewhere = {
        f"{PARTITIONS}/{name}"
        for name in {Path(path).parts[1] for path in checksums if path.startswith(f"{PARTITIONS}/")}
        if part_of_folder(name) is not None and not (partitions / name).is_dir()
    }
    here = [path for path in checksums if "/".join(Path(path).parts[:2]) not in elsewhere]
    for path, found in zip(here, _checksums([folder / path for path in here])):
        if found != checksums[path]:
            raise InputError(
                f"{folder / path} is damaged: its CRC-32 is {found:08x}, {DESCRIPTION} says "
                f"{checksums[path]:08x}; copy it again, or partition again"
            )


def _checksums(paths: list[Path]) -> list[int]:
    # zlib releases the GIL while it reads a block.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_checksum, paths))


def _checksum(path: Path) -> int:
    checksum = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                checksum = zlib.crc32(block, checksum)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    return checksum
