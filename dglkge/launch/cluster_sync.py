"""A job whose machines share no disk: what each gets before it starts, and what comes back when it has ended.

The first machine's disk holds the run's folder while the job runs: the other machines send it their parts
of each checkpoint (:mod:`dglkge.checkpoint.courier`), and it publishes. Before a job starts every machine
gets the newest version that was published, which is that of the first machine or the launcher's copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dglkge.config import Config
from dglkge.errors import InputError
from dglkge.launch.file_transfer import Tree, bring, files_below, send
from dglkge.launch.host_files import read_text
from dglkge.launch.host_session import HostSession
from dglkge.launch.places import Places
from dglkge.launch.sync_plan import plan_sync

CHECKPOINT = "checkpoint"
VERSION_FILE = "checkpoint_version.txt"
"""PyTorch-BigGraph's names; the file says which version counts and so comes last."""

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


def bring_newer_output(first: HostSession, output: Path, places: Places) -> int:
    """Bring the run's folder from the first machine if that is newer; return the version then here."""
    there = str(places.on_machines(output))
    found = first.ask("read_text", path=f"{there}/{CHECKPOINT}/{VERSION_FILE}")
    if _version(found) > published_version(output):
        bring_output(first, output, places)
    return published_version(output)


def send_output(session: HostSession, output: Path, places: Places) -> int:
    """Bring a machine the run that is here: its records and its checkpoint, beside which nothing stays.

    The records (stats.jsonl and others) matter where another machine is the first now, which goes on in them.
    """
    records = tuple(path.name for path in sorted(output.iterdir()) if path.is_file())
    num_sent = send(session, Tree(str(output), str(places.on_machines(output)), records))
    folder = output / CHECKPOINT
    tree = Tree(str(folder), str(places.on_machines(folder)), files_below(folder))
    return num_sent + send(session, tree, last=[VERSION_FILE], is_mirror=True)


def bring_output(first: HostSession, output: Path, places: Places) -> int:
    """Bring the run's folder from the first machine; what its checkpoint has dropped is dropped here."""
    there = str(places.on_machines(output))
    last = [f"{CHECKPOINT}/{VERSION_FILE}"]
    return bring(first, there, str(output), last, dropped_in=CHECKPOINT)


def bring_logs(session: HostSession, log_dir: Path, places: Places) -> int:
    """Bring what the script has written to the log folder; the processes' own output is here already."""
    return bring(session, str(places.on_machines(log_dir)), str(log_dir), skip=[JOB_FILE])


def published_version(output: Path) -> int:
    """Return the version of the checkpoint in a run's folder, 0 where there is none."""
    return _version(read_text(str(output / CHECKPOINT / VERSION_FILE)))


def _version(text: str | None) -> int:
    """Read a version file."""
    try:
        return int(text or "0")
    except ValueError:
        raise InputError(f"{VERSION_FILE} reads {text!r}; expected one number") from None
