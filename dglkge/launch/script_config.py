"""What a training script's arguments tell the launcher: its configuration, read as the script reads it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dglkge.config import Config, load_config
from dglkge.errors import InputError


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
