"""Files of a job whose machines share no disk: inputs before it starts, logs and records afterwards.

The run itself is in the launcher's folder while the job runs: :mod:`dglkge.launch.remote.run_store`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, FEATURES_FOLDER, LEASE_FILE, WRITER_FILE
from dglkge.config import Config
from dglkge.data.dataset_files import PARTITIONS, Field, part_of_folder
from dglkge.errors import InputError
from dglkge.launch.connection import NodeConnection
from dglkge.launch.process_plan import Places
from dglkge.launch.remote.file_transfer import Tree, fetch, files_below, send

NOT_RECORDS = (CHECKPOINT_FOLDER, FEATURES_FOLDER, LEASE_FILE, WRITER_FILE)
"""Of a run's folder: what the store has, or belongs to one machine."""


def plan_sync(
    command: Sequence[str], config: Config | None, part_config: str | None, places: Places, part_id: int
) -> list[Tree]:
    """Return the files that one machine needs before a job can run there.

    Parameters
    ----------
    command : sequence of str
        The script and its arguments, or ``-m``, a module and its arguments.
    config : Config or None
        The script's configuration, which names the data set; None for other scripts.
    part_config : str or None
        DGL's partition file of other scripts.
    places : Places
    part_id : int
        The machine's own partition.

    Returns
    -------
    list of Tree

    Raises
    ------
    InputError
        If a relative path leads out of the folder.
    """
    files = [*_program(command, places.here), *_named_files(command, places.here)]
    if config is not None:
        folder = places.here / config.dataset
        files += [folder / name for name in dataset_files(folder, part_id)]
    if part_config is not None:
        files += _graph_files(places.here / part_config, part_id)
    return _trees(files, places)


def dataset_files(folder: Path, part_id: int) -> list[str]:
    """Return the files of a data set without the partitions of other machines."""
    names = []
    for name in files_below(folder):
        parts = Path(name).parts
        of_part = part_of_folder(parts[1]) if len(parts) > 2 and parts[0] == PARTITIONS else None
        if of_part in (None, part_id):
            names.append(name)
    return names


def _program(command: Sequence[str], here: Path) -> Iterator[Path]:
    """Yield the script and the modules beside it, or the whole package of a module."""
    if command[0] == "-m":
        package = here / command[1].partition(".")[0]
        # Only Python files: data beside a script is named in arguments or in the configuration.
        yield from sorted(package.rglob("*.py"))
        yield from (path for path in [package.with_suffix(".py")] if path.is_file())
    else:
        yield from sorted((here / command[0]).parent.glob("*.py"))


def _named_files(command: Sequence[str], here: Path) -> Iterator[Path]:
    """Yield the files that arguments name, whole or after ``=``."""
    for word in command:
        for text in (word, word.partition("=")[2]):
            if text and "\0" not in text and (here / text).is_file():
                yield here / text


def _graph_files(part_config: Path, part_id: int) -> Iterator[Path]:
    """Yield DGL's partition file and the files of one partition."""
    yield part_config
    try:
        content = json.loads(part_config.read_bytes())
        yield from (part_config.parent / name for name in content[Field.part_files(part_id)].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return  # the check on the machine reports the problem


def _trees(files: Sequence[Path], places: Places) -> list[Tree]:
    """Group files by target: those of the launcher's folder go to the workspace, others to the same path."""
    inside: list[str] = []
    outside: dict[Path, list[str]] = {}
    for path in dict.fromkeys(files):
        # is_relative_to compares names only, so a path with ".." could lead out of the folder.
        if ".." in path.parts:
            raise InputError(f"{path} lies outside of {places.here}, so --sync has no place for it: {path}")
        if path.is_relative_to(places.here):
            inside.append(str(path.relative_to(places.here)))
        else:
            outside.setdefault(path.parent, []).append(path.name)
    trees = [Tree(str(folder), str(folder), tuple(names)) for folder, names in outside.items()]
    if inside:
        trees.append(Tree(str(places.here), str(places.workspace), tuple(inside)))
    return trees


JOB_FILE = "ip_config.txt"


def send_inputs(
    sessions: Mapping[str, NodeConnection],
    order: Sequence[str],
    command: Sequence[str],
    config: Config | None,
    part_config: str | None,
    places: Places,
) -> Callable[[str], int]:
    """Return a function that sends one machine the script, files named in arguments, and its partition.

    Parameters
    ----------
    sessions : mapping of str to NodeConnection
        By address.
    order : sequence of str
        Addresses; machine k holds partition k.
    command, config, part_config, places
        See :func:`dglkge.launch.remote.sync.plan_sync`.

    Returns
    -------
    callable
        Given an address, returns the number of files that were sent.
    """

    def work(address: str) -> int:
        session = sessions[address]
        session.call("place_folder", folder=str(places.workspace))
        trees = plan_sync(command, config, part_config, places, order.index(address))
        return sum(send(session, tree) for tree in trees)

    return work


def fetch_records(session: NodeConnection, output: Path, places: Places, check: Callable[[], object]) -> int:
    """Fetch the run's records from the first machine, which has written them since the last version.

    Before any file is renamed into its place, `check` is called: it raises if another job writes here now.
    """
    there = str(places.on_machines(output))
    return fetch(session, there, str(output), lambda name: name.split("/")[0] not in NOT_RECORDS, check)


def fetch_logs(session: NodeConnection, log_dir: Path, places: Places) -> int:
    """Fetch files that the script has written to the log folder; the launcher itself writes the logs here."""
    return fetch(session, str(places.on_machines(log_dir)), str(log_dir), lambda name: name != JOB_FILE)
