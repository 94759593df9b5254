"""DGL's partition file, as far as the launcher must know it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dglkge.errors import InputError


def check_part_config(path: Path, num_machines: int) -> None:
    """Check that a partition file fits the cluster: one partition for each machine.

    Raises
    ------
    InputError
        If the file cannot be read, is not DGL's, or has another number of partitions.
    """
    content = _read(path)
    num_parts = content.get("num_parts") if isinstance(content, dict) else None
    if not isinstance(num_parts, int):
        raise InputError(
            f"partition file {path} has no 'num_parts'; expected the file that DGL's partitioner wrote"
        )
    if num_parts != num_machines:
        raise InputError(
            f"partition file {path} has {num_parts} partitions and ip_config has {num_machines} machines; "
            "each machine holds one partition"
        )


def check_part(path: Path, part_id: int) -> None:
    """Check that the files of one partition are there.

    Parameters
    ----------
    path : Path
        DGL's partition file, which names them relative to its own folder.
    part_id : int

    Raises
    ------
    InputError
        Naming the first file that is missing.
    """
    files = _read(path).get(f"part-{part_id}")
    if not isinstance(files, dict):
        raise InputError(f"{path} names no files of partition {part_id}")
    for name in files.values():
        if not (path.parent / str(name)).is_file():
            raise InputError(f"partition {part_id} is not whole: {path.parent / str(name)} is missing")


def _read(path: Path) -> Any:
    """Read the partition file."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read partition file {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"partition file {path} is no JSON file: {error}") from None
