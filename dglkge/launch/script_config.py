"""Reads a training script's configuration, to plan and check a job before it starts.

What reads one is imported when there is one: its settings take half of the launcher's start.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dglkge.data import dataset_files
from dglkge.errors import InputError
from dglkge.launch.process_plan import Places
from dglkge.launch.table_storage import MachineNeeds
from dglkge.planning.host import MOST_DEFAULT_TRAINERS

if TYPE_CHECKING:
    from dglkge.config import Config


def script_config(command: Sequence[str], folder: Path) -> Config | None:
    """Read the configuration of a script that takes ``--config FILE`` and ``--set KEY=VALUE``.

    None for scripts with another command line, and for a wrong configuration, which the script itself then
    reports. `folder` is the base of relative paths.
    """
    # Scripts of other projects may have a --config of their own: what does not parse is not ours.
    if not any(word.partition("=")[0] in ("--config", "--set", "dataset") for word in command):
        return None
    from dglkge.config import load_config

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # The same options as the training script has, so both read the same configuration.
    parser.add_argument("--config")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--import", dest="imports", action="append", default=[])
    try:
        options, rest = parser.parse_known_args(list(command[1:]))
        bare = [word for word in rest if "=" in word and not word.startswith("-")]
        path = None if options.config is None else folder / options.config
        return load_config(path, [*options.set, *bare], options.imports)
    except (InputError, SystemExit):
        return None


def partition_file(config: Config | None, folder: Path) -> Path | None:
    """Return DGL's partition file of a configuration's data set; None if it is not here.

    It may be on the machines only, and the script reports a damaged one. Raises InputError if a file is
    there, or a folder with something else in it.
    """
    if config is None:
        return None
    dataset = folder / config.dataset
    # An empty folder may be where the machines have mounted a disk.
    if dataset.is_file() or (dataset.is_dir() and any(dataset.iterdir())):
        dataset_files.require_dataset(dataset)
    try:
        return dataset_files.locate_partitions(dataset)[1]
    except InputError:
        return None


def most_trainers_of(config: Config | None, places: Places) -> int:
    """Return the trainers of a machine at most without the user's choice, as far as the data set is here."""
    if config is not None:
        from dglkge.planning.defaults import most_trainers

        with contextlib.suppress(InputError):
            return most_trainers(config, dataset_files.read_dataset_size(places.here / config.dataset))
    return MOST_DEFAULT_TRAINERS


def machine_needs(
    config: Config | None, places: Places, num_machines: int, num_trainers: int, num_servers: int
) -> list[MachineNeeds]:
    """Return what a job needs on each machine, as far as the descriptions of its data set are here."""
    if config is None:
        return [MachineNeeds()] * num_machines
    from dglkge.planning.memory import plan_memory

    folder = config.tables.folder
    folders = (str(places.on_machines(Path(folder))),) if folder else ()
    storage = config.tables.storage
    needs = [MachineNeeds(storage=storage, table_folders=folders)] * num_machines
    with contextlib.suppress(InputError):
        size = dataset_files.read_dataset_size(places.here / config.dataset)
        for host in plan_memory(config, size, num_trainers, num_servers)[:num_machines]:
            memory = host.needed_bytes(in_files=False) - host.base_bytes
            needs[host.machine] = MachineNeeds(
                host.shared_memory_bytes, memory, host.structure_bytes, storage, folders
            )
    return needs
