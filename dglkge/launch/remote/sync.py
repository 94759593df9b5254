"""Copies of a job's files for machines that share no disk: inputs before it starts, results afterwards.

The disk of the first machine has the run's folder while the job runs: the other machines send it their parts
of each checkpoint (:mod:`dglkge.checkpoint.courier`), and it publishes versions. The launcher fetches
published versions while the job runs, and the rest at its end. Before a job starts, the copies of the run on
all machines are compared (:mod:`dglkge.launch.remote.run_copies`), and every machine gets the newest version.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, VERSION_FILE, is_transient
from dglkge.checkpoint.lineage import RunCopy, copy_from_dict
from dglkge.checkpoint.storage import read_copy
from dglkge.config import Config
from dglkge.data.dataset_files import PARTITIONS, Field, part_of_folder
from dglkge.errors import InputError
from dglkge.launch.connection import NodeConnection
from dglkge.launch.process_plan import Places
from dglkge.launch.remote.file_transfer import COMPARE_SECONDS, Tree, fetch, files_below, send
from dglkge.launch.remote.run_copies import HOLD_FOLDER, HOLD_SLICE_SECONDS, OWN_FILES, Candidate, choose_copy


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


def choose_source(
    sessions: Mapping[str, NodeConnection],
    found: Mapping[str, Mapping[str, Any]],
    output: Path,
    places: Places,
) -> tuple[str | None, RunCopy]:
    """Choose the copy of a run that the job continues, among those of all machines and the local one.

    Parameters
    ----------
    sessions : mapping of str to NodeConnection
        By address, in the order of the job.
    found : mapping of str to mapping
        Replies of ``run_copies.describe_copy`` by address.
    output : Path
        The local folder of the run.
    places : Places

    Returns
    -------
    source : str or None
        The machine from which the run must be fetched first; None if the local copy is the newest.
    copy : RunCopy
        The copy that was chosen.

    Raises
    ------
    InputError
        See :func:`dglkge.launch.remote.run_copies.choose_copy`.
    """
    here = Candidate(f"{output} on {socket.gethostname()} (the launcher)", read_copy(output))
    there = places.on_machines(output)
    candidates = {
        address: Candidate(
            f"{there} on {sessions[address].address}",
            copy_from_dict(one["copy"]),
            bool(one["was_fetched"]),
        )
        for address, one in found.items()
    }
    source = choose_copy(here, candidates)
    return source, (here if source is None else candidates[source]).copy


def launcher_place(output: Path) -> str:
    """Return the identity of the launcher's folder of a run."""
    return f"{socket.gethostname()}:{output.resolve()}"


def send_output(session: NodeConnection, output: Path, places: Places) -> int:
    """Send a machine the local copy of the run: its records and its checkpoint; other checkpoint files go.

    The records (stats.jsonl and others) are needed if another machine is the first now, which appends to
    them.
    """
    there = str(places.on_machines(output))
    # A launcher that was killed may have left its hold; with it the machine's disk keeps an old version.
    session.call("drop_hold", COMPARE_SECONDS, hold=str(Path(there, HOLD_FOLDER)))
    # Where the launcher's machine is one of the job's, its node program may be writing its list here.
    records = tuple(
        path.name
        for path in sorted(output.iterdir())
        if path.is_file() and path.name not in OWN_FILES and not is_transient(path.name)
    )
    num_sent = send(session, Tree(str(output), there, records))
    folder = output / CHECKPOINT_FOLDER
    tree = Tree(str(folder), str(places.on_machines(folder)), files_below(folder))
    # The version file last, as in a publication: an interrupted copy still reads as the old version.
    num_sent += send(session, tree, last=[VERSION_FILE], is_mirror=True)
    session.call("note_origin", folder=there, launcher=launcher_place(output))
    return num_sent


def fetch_output(
    session: NodeConnection, output: Path, places: Places, job: str, check: Callable[[], object]
) -> int:
    """Fetch the run's folder from a machine; checkpoint files that it no longer has are removed here.

    Before any file is renamed into its place, `check` is called: it raises if another job writes here now.

    Raises
    ------
    InputError
        If it cannot be fetched, or the local copy has another history; then nothing is changed.
    """
    there = str(places.on_machines(output))
    found = session.call("describe_copy", folder=there, launcher=launcher_place(output), job=job)
    copy, own = copy_from_dict(found["copy"]), read_copy(output)
    # A copy is replaced only by one that continues it: results must not be overwritten by older ones.
    if copy.problem or (own.version and not own.problem and not copy.continues(own)):
        reason = copy.problem or f"it has {copy.describe()}, which does not go on from {own.describe()}"
        raise InputError(f"{there} was not brought to {output}: {reason}")
    last = [f"{CHECKPOINT_FOLDER}/{VERSION_FILE}"]
    num_fetched = fetch(
        session, there, str(output), last, OWN_FILES, dropped_in=CHECKPOINT_FOLDER, check=check
    )
    if copy.version:
        session.call("note_origin", folder=there, launcher=launcher_place(output))
    return num_fetched


def fetch_version(
    session: NodeConnection,
    output: Path,
    places: Places,
    is_cancelled: Callable[[], bool],
    check: Callable[[], object],
) -> int | None:
    """Fetch the newest version while the job runs; return its number, or None if there is nothing new.

    `check` is that of :func:`fetch_output`.
    """
    there = str(places.on_machines(output))
    if session.is_here and Path(there).resolve() == output.resolve():
        return None
    question = {"folder": there, "known": read_copy(output).checksum, "seconds": HOLD_SLICE_SECONDS}
    hold = session.call("hold_version", COMPARE_SECONDS, is_cancelled, **question)
    while isinstance(hold, dict):  # it copies files, and every answer is progress
        hold = session.call("hold_version", COMPARE_SECONDS, is_cancelled, **question)
    if hold is None:
        return None
    try:
        last = [f"{CHECKPOINT_FOLDER}/{VERSION_FILE}"]
        fetch(
            session,
            hold,
            str(output),
            last,
            dropped_in=CHECKPOINT_FOLDER,
            is_cancelled=is_cancelled,
            check=check,
        )
    finally:
        session.call("drop_hold", COMPARE_SECONDS, hold=hold)
    session.call("note_origin", folder=there, launcher=launcher_place(output))
    return read_copy(output).version


def fetch_logs(session: NodeConnection, log_dir: Path, places: Places) -> int:
    """Fetch files that the script has written to the log folder; the launcher itself writes the logs here."""
    return fetch(session, str(places.on_machines(log_dir)), str(log_dir), skip=[JOB_FILE])
