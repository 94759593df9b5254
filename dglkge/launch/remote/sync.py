"""Files of a job whose machines share no disk: what each gets before it starts, and what comes back.

The first machine's disk holds the run's folder while the job runs: the other machines send it their parts
of each checkpoint (:mod:`dglkge.checkpoint.courier`), and it publishes. Published versions are brought here
while the job runs, and at its end. Before a job starts all machines are asked what they have of the run
(:mod:`dglkge.launch.remote.run_copies`), and every one gets the newest version.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, VERSION_FILE
from dglkge.checkpoint.lineage import RunCopy, copy_from_dict, read_copy
from dglkge.config import Config
from dglkge.data.dataset_files import PARTITIONS, Field, part_of_folder
from dglkge.errors import InputError
from dglkge.launch.process_plan import Places
from dglkge.launch.remote.file_transfer import COMPARE_SECONDS, Tree, bring, files_below, send
from dglkge.launch.remote.run_copies import HOLD_FOLDER, OWN_FILES, Candidate, choose_copy
from dglkge.launch.remote.session import HostSession


def plan_sync(
    command: Sequence[str], config: Config | None, part_config: str | None, places: Places, part_id: int
) -> list[Tree]:
    """List what one machine needs before a job can run there.

    Parameters
    ----------
    command : sequence of str
        The script and its arguments, or ``-m``, a module and its arguments.
    config : Config or None
        The script's configuration, where it has one of ours: names the data set.
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
    """Return what a trainer reads of a data set: all but the partitions of other machines."""
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
        return  # what is wrong with it, the check on the machine says


def _trees(files: Sequence[Path], places: Places) -> list[Tree]:
    """Group files by where they go: those of the folder to the workspace, others to the same path."""
    inside: list[str] = []
    outside: dict[Path, list[str]] = {}
    for path in dict.fromkeys(files):
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
    sessions: Mapping[str, HostSession],
    order: Sequence[str],
    command: Sequence[str],
    config: Config | None,
    part_config: str | None,
    places: Places,
) -> Callable[[str], int]:
    """Return what brings one machine the script, the files that its arguments name, and its partition.

    Parameters
    ----------
    sessions : mapping of str to HostSession
        By address.
    order : sequence of str
        Addresses; machine k holds partition k.
    command, config, part_config, places
        See :func:`dglkge.launch.remote.sync.plan_sync`.

    Returns
    -------
    callable
        Given an address, returns how many files were sent.
    """

    def work(address: str) -> int:
        session = sessions[address]
        session.ask("place_folder", folder=str(places.workspace))
        trees = plan_sync(command, config, part_config, places, order.index(address))
        return sum(send(session, tree) for tree in trees)

    return work


def choose_source(
    sessions: Mapping[str, HostSession],
    found: Mapping[str, Mapping[str, Any]],
    output: Path,
    places: Places,
) -> tuple[str | None, RunCopy]:
    """Choose the copy of a run that the job goes on from, among those of all machines and the one here.

    Parameters
    ----------
    sessions : mapping of str to HostSession
        By address, in the order of the job.
    found : mapping of str to mapping
        What ``run_copies.describe_copy`` said on each machine.
    output : Path
        The run's folder here.
    places : Places

    Returns
    -------
    source : str or None
        The machine from which the run must be brought here first.
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
            bool(one["was_brought"]),
        )
        for address, one in found.items()
    }
    source = choose_copy(here, candidates)
    return source, (here if source is None else candidates[source]).copy


def launcher_place(output: Path) -> str:
    """Name the launcher's folder of a run."""
    return f"{socket.gethostname()}:{output.resolve()}"


def send_output(session: HostSession, output: Path, places: Places) -> int:
    """Bring a machine the run that is here: its records and its checkpoint, beside which nothing stays.

    The records (stats.jsonl and others) matter where another machine is the first now, which goes on in them.
    """
    there = str(places.on_machines(output))
    session.ask("drop_hold", COMPARE_SECONDS, hold=str(Path(there, HOLD_FOLDER)))
    records = tuple(
        path.name for path in sorted(output.iterdir()) if path.is_file() and path.name not in OWN_FILES
    )
    num_sent = send(session, Tree(str(output), there, records))
    folder = output / CHECKPOINT_FOLDER
    tree = Tree(str(folder), str(places.on_machines(folder)), files_below(folder))
    num_sent += send(session, tree, last=[VERSION_FILE], is_mirror=True)
    session.ask("note_origin", folder=there, launcher=launcher_place(output))
    return num_sent


def bring_output(
    session: HostSession, output: Path, places: Places, job: str, check: Callable[[], object]
) -> int:
    """Bring the run's folder from a machine; what its checkpoint has dropped is dropped here.

    Before anything takes its place here, `check` is called: it raises if another job writes here now.

    Raises
    ------
    InputError
        If it cannot be brought, or the copy here has another history: it is left as it is.
    """
    there = str(places.on_machines(output))
    found = session.ask("describe_copy", folder=there, launcher=launcher_place(output), job=job)
    copy, own = copy_from_dict(found["copy"]), read_copy(output)
    if copy.problem or (own.version and not own.problem and not copy.continues(own)):
        reason = copy.problem or f"it has {copy.describe()}, which does not go on from {own.describe()}"
        raise InputError(f"{there} was not brought to {output}: {reason}")
    last = [f"{CHECKPOINT_FOLDER}/{VERSION_FILE}"]
    num_brought = bring(
        session, there, str(output), last, OWN_FILES, dropped_in=CHECKPOINT_FOLDER, check=check
    )
    if copy.version:
        session.ask("note_origin", folder=there, launcher=launcher_place(output))
    return num_brought


def bring_version(
    session: HostSession,
    output: Path,
    places: Places,
    is_cancelled: Callable[[], bool],
    check: Callable[[], object],
) -> int | None:
    """Bring the newest version while the job runs; returns its number, None if there is nothing new.

    `check` is that of :func:`bring_output`.
    """
    there = str(places.on_machines(output))
    if session.ssh is None and Path(there).resolve() == output.resolve():
        return None
    hold = session.ask("hold_version", COMPARE_SECONDS, folder=there, known=read_copy(output).checksum)
    if hold is None:
        return None
    try:
        last = [f"{CHECKPOINT_FOLDER}/{VERSION_FILE}"]
        bring(
            session,
            hold,
            str(output),
            last,
            dropped_in=CHECKPOINT_FOLDER,
            is_cancelled=is_cancelled,
            check=check,
        )
    finally:
        session.ask("drop_hold", COMPARE_SECONDS, hold=hold)
    session.ask("note_origin", folder=there, launcher=launcher_place(output))
    return read_copy(output).version


def bring_logs(session: HostSession, log_dir: Path, places: Places) -> int:
    """Bring what the script has written to the log folder; the processes' own output is here already."""
    return bring(session, str(places.on_machines(log_dir)), str(log_dir), skip=[JOB_FILE])


STOP_SECONDS = 20.0


class VersionBringer:
    """Looks from time to time for a new version on the first machine, and brings the newest.

    It has an agent of its own there, so it never keeps the job's waiting. What goes wrong is told once, and
    tried again: the job does not depend on it.

    Parameters
    ----------
    connect : callable
        Starts an agent on the first machine.
    bring : callable
        Given the agent and a test whether to give up, brings the newest version; returns its number, or None
        if there is nothing new.
    say : callable
        Takes messages for people.
    seconds : float
        Between two looks.
    """

    def __init__(
        self,
        connect: Callable[[], HostSession],
        bring: Callable[[HostSession, Callable[[], bool]], int | None],
        say: Callable[[str], None],
        seconds: float,
    ) -> None:
        self._connect = connect
        self._bring = bring
        self._say = say
        self._seconds = seconds
        self._session: HostSession | None = None
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dglkge-bring", daemon=True)

    def start(self) -> None:
        """Start to look."""
        self._thread.start()

    def stop(self) -> None:
        """End at once; a transfer is given up, and leaves what was here before."""
        self._is_stopped.set()
        session = self._session
        if session is not None:
            session.cut()  # what waits for an answer goes on; the thread itself closes what it reads from
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        """Look until stopped."""
        try:
            self._look()
        finally:
            self._close()

    def _look(self) -> None:
        """Bring what is new, from time to time."""
        is_told = False
        while not self._is_stopped.wait(self._seconds):
            try:
                if self._session is None:
                    self._session = self._connect()
                if self._is_stopped.is_set():  # it was too late to be cut
                    return
                self._bring(self._session, self._is_stopped.is_set)
                is_told = False
            except (InputError, OSError, ValueError) as error:
                if self._is_stopped.is_set():
                    return
                if not is_told:
                    self._say(f"warning: the newest version could not be brought here, trying again: {error}")
                is_told = True
                if self._session is not None and not self._session.is_alive:
                    self._close()

    def _close(self) -> None:
        """Let the agent go."""
        if self._session is not None:
            self._session.close()
            self._session = None
