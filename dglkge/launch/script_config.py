"""Reads a training script's configuration and DGL's partition file, to check a job before it starts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dglkge.config import Config, load_config
from dglkge.data.dataset_files import (
    Field,
    dataset_size,
    load_json,
    locate_partitions,
    read_dataset_size,
    require_dataset,
)
from dglkge.errors import InputError
from dglkge.planning.memory import PlannedHost, plan_memory
from dglkge.planning.shared_memory import shared_memory_bytes


def check_part_config(path: Path, num_machines: int) -> None:
    """Check that a partition file fits the cluster: one partition for each machine.

    Raises
    ------
    InputError
        If the file cannot be read, is not DGL's, or has another number of partitions.
    """
    content = _read(path)
    num_parts = content.get(Field.NUM_PARTS) if isinstance(content, dict) else None
    if not isinstance(num_parts, int):
        raise InputError(
            f"partition file {path} has no {Field.NUM_PARTS!r}; "
            "expected the file that DGL's partitioner wrote"
        )
    if num_parts != num_machines:
        raise InputError(
            f"partition file {path} has {num_parts} partitions and ip_config has {num_machines} machines; "
            "each machine holds one partition"
        )


def check_part(path: Path, part_id: int) -> None:
    """Check that the files of one partition exist.

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
    files = _read(path).get(Field.part_files(part_id))
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


@dataclass(frozen=True)
class MachineNeeds:
    """Needs of a job on one machine, as far as they are known.

    Attributes
    ----------
    shared_memory_bytes : int
        0: unknown, as in the others.
    memory_bytes : int
        Memory of all processes, shared memory included, without files that are only mapped and without
        interpreters and libraries.
    structure_bytes : int
        The part of the shared memory that stays there where tables are files.
    storage : str
        ``tables.storage`` of the configuration.
    table_folders : tuple of str
        Folders for tables in files: the first with enough room is taken.
    """

    shared_memory_bytes: int = 0
    memory_bytes: int = 0
    structure_bytes: int = 0
    storage: str = "memory"
    table_folders: tuple[str, ...] = ()


def script_config(command: Sequence[str], folder: Path) -> Config | None:
    """Read the configuration of a script that takes ``--config FILE`` and ``--set KEY=VALUE``.

    Parameters
    ----------
    command : sequence of str
        The script and its arguments.
    folder : Path
        Base of relative paths.

    Returns
    -------
    Config or None
        None for scripts with another command line, and for a wrong configuration, which the script itself
        then reports.
    """
    # Scripts of other projects may have a --config of their own: what does not parse is not ours.
    if not any(word.partition("=")[0] in ("--config", "--set", "dataset") for word in command):
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # The same options as the training script has, so both read the same configuration.
    parser.add_argument("--config")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--import", dest="imports", action="append", default=[])
    try:
        found, rest = parser.parse_known_args(list(command[1:]))
        bare = [word for word in rest if "=" in word and not word.startswith("-")]
        path = None if found.config is None else folder / found.config
        return load_config(path, [*found.set, *bare], found.imports)
    except (InputError, SystemExit):
        return None


def dataset_needs(config: Config | None, folder: Path) -> tuple[Path | None, dict[int, int]]:
    """Return what a configuration's data set needs on the machines, as far as its descriptions are here.

    Parameters
    ----------
    config : Config or None
        None: nothing is known.
    folder : Path
        Base of relative paths.

    Returns
    -------
    partition_file : Path or None
        DGL's partition file.
    shared_memory_bytes : dict of int to int
        Bytes of ``/dev/shm`` by number of the machine; empty if unknown.

    Raises
    ------
    InputError
        If a file is there, or a folder with something else in it.
    """
    if config is None:
        return None, {}
    dataset = folder / config.dataset
    # An empty folder may be where the machines have mounted a disk.
    if dataset.is_file() or (dataset.is_dir() and any(dataset.iterdir())):
        require_dataset(dataset)
    # What is missing here is unknown, not an error: the data set may be on the machines only, and the script
    # reports a damaged one.
    try:
        description, found = locate_partitions(dataset)
    except InputError:
        return None, {}
    try:
        parts = dataset_size(dataset, description, load_json(found)).parts
        return found, {machine: shared_memory_bytes(part, config) for machine, part in enumerate(parts)}
    except InputError:
        return found, {}


def planned_hosts(
    config: Config | None, folder: Path, num_trainers: int, num_servers: int
) -> list[PlannedHost]:
    """Return the plan of a job's machines; empty if unknown.

    Parameters
    ----------
    config : Config or None
        None: nothing is known.
    folder : Path
        Base of relative paths.
    num_trainers, num_servers : int
        On each machine.
    """
    if config is None:
        return []
    try:
        return plan_memory(config, read_dataset_size(folder / config.dataset), num_trainers, num_servers)
    except InputError:
        return []
