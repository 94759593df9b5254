"""What a training script's arguments tell: its configuration, and what that needs of the machines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dglkge.config import Config, load_config
from dglkge.errors import InputError
from dglkge.planning.shared_memory import shared_memory_by_machine


@dataclass(frozen=True)
class Needs:
    """What a job needs of its machines, as far as the launcher knows.

    Attributes
    ----------
    partition_file : str or None
        DGL's partition file, as a path on the machines.
    shared_memory_bytes : mapping of int to int
        By number of the machine.
    """

    partition_file: str | None = None
    shared_memory_bytes: Mapping[int, int] = field(default_factory=dict)


def script_config(command: Sequence[str], folder: Path) -> Config | None:
    """Read the configuration of a script that takes ``--config FILE`` and ``--set KEY=VALUE``.

    Parameters
    ----------
    command : sequence of str
        The script and its arguments.
    folder : Path
        Where relative paths start.

    Returns
    -------
    Config or None
        None for scripts with another command line, and where the configuration is wrong: the script itself
        then says so.
    """
    if not any(word.partition("=")[0] in ("--config", "--set") for word in command):
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--set", action="append", default=[])
    try:
        found, _ = parser.parse_known_args(list(command[1:]))
        return load_config(None if found.config is None else folder / found.config, found.set)
    except (InputError, SystemExit):
        return None


def shared_memory_need(config: Config | None, folder: Path) -> dict[int, int]:
    """Return the bytes of shared memory that each machine needs; empty where they are not known here."""
    if config is None:
        return {}
    try:
        return dict(enumerate(shared_memory_by_machine(folder / config.dataset, config)))
    except InputError:
        return {}


def partition_file(config: Config | None, folder: Path) -> Path | None:
    """Return DGL's partition file of the data set; None where it is not known here."""
    if config is None:
        return None
    dataset = folder / config.dataset
    try:
        return (
            dataset
            / "partitions"
            / f"{json.loads((dataset / 'dataset.json').read_bytes())['graph_name']}.json"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
