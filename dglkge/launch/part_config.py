"""DGL's partition file, as far as the launcher must know it."""

from __future__ import annotations

import json
from pathlib import Path

from dglkge.errors import InputError


def check_part_config(path: Path, num_machines: int) -> None:
    """Check that a partition file fits the cluster: one partition for each machine.

    Raises
    ------
    InputError
        If the file cannot be read, is not DGL's, or has another number of partitions.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read --part_config {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"--part_config {path} is no JSON file: {error}") from None
    num_parts = content.get("num_parts") if isinstance(content, dict) else None
    if not isinstance(num_parts, int):
        raise InputError(
            f"--part_config {path} has no 'num_parts'; expected the file that DGL's partitioner wrote"
        )
    if num_parts != num_machines:
        raise InputError(
            f"--part_config {path} has {num_parts} partitions and ip_config has {num_machines} machines; "
            "each machine holds one partition"
        )
