"""A job whose machines share no disk: what each gets before it starts, and what comes back when it has ended.

The first machine's disk holds the run's folder while the job runs: the other machines send it their parts
of each checkpoint (:mod:`dglkge.checkpoint.courier`), and it publishes. Published versions are brought here
while the job runs, and at its end. Before a job starts all machines are asked what they have of the run
(:mod:`dglkge.launch.run_copies`), and every one gets the newest version.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dglkge.config import Config
from dglkge.data.lineage import CHECKPOINT_FOLDER, VERSION_FILE, RunCopy, copy_from_dict, read_copy
from dglkge.errors import InputError
from dglkge.launch.file_transfer import COMPARE_SECONDS, Tree, bring, files_below, send
from dglkge.launch.host_session import HostSession
from dglkge.launch.places import Places
from dglkge.launch.run_copies import HOLD_FOLDER, OWN_FILES, Candidate, choose_copy
from dglkge.launch.sync_plan import plan_sync

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
        See :func:`dglkge.launch.sync_plan.plan_sync`.

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
        See :func:`dglkge.launch.run_copies.choose_copy`.
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
