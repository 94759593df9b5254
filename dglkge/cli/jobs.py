"""``dglkge job list`` and ``stop``: the training jobs of this machine, from their launchers' register."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import time
from collections.abc import Mapping
from typing import Any

from dglkge.cli.common import Cells, command, flag, option, print_table, print_text
from dglkge.distributed import jobs
from dglkge.distributed.jobs import JobEntry, human_bytes, live_jobs
from dglkge.errors import InputError, JobError

POLL_SECONDS = 0.1
SECOND_SIGNAL_SECONDS = 1.0
"""Time in which the launcher takes the first signal: two that come at once may count as one."""


@command()
def list_jobs(_args: argparse.Namespace) -> list[dict[str, Any]]:
    """List the jobs that dglkge-launch and dglkge train run on this machine, of all users: who started
    them, their run folder, and the memory that they have planned. Jobs in containers with a /dev/shm of
    their own are not seen from here.

    Examples
    --------
      dglkge job list
      dglkge job list --json
      dglkge job stop runs/mine
    """
    rows = []
    for entry in live_jobs():
        taken = {"allocated_shared_memory_bytes": jobs.allocated_bytes(entry.job)}
        rows.append({**entry.to_dict(), **taken, "is_launched_here": entry.is_launched_here})
    return rows


@list_jobs.shows
def show_jobs(rows: list[dict[str, Any]], _args: argparse.Namespace) -> None:
    """Print the jobs as a table."""
    if rows:
        print_table(CELLS, rows)
    else:
        print_text("no job runs on this machine")


def _where(job: Mapping[str, Any]) -> str:
    return f"pid {job['launcher_pid']}" + ("" if job["is_launched_here"] else f" on {job['host'] or '?'}")


def _segments(job: Mapping[str, Any]) -> str:
    planned = job["shared_memory_bytes"]
    taken = human_bytes(job["allocated_shared_memory_bytes"])
    return f"{taken} of {human_bytes(planned)}" if planned else taken


CELLS: Cells = {
    "job": "{job}",
    "user": "{user}",
    "launcher": _where,
    "started": lambda job: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["started"])),
    "memory": lambda job: human_bytes(job["memory_bytes"]) if job["memory_bytes"] else "unknown",
    "/dev/shm": _segments,
    "run or script": lambda job: job["run"] or shlex.join(job["command"]),
}


@command(
    option("job RUN|JOB", "folder of the run, id of the job, or pid of its launcher"),
    flag("--now", "do not wait for a commit"),
    option("--seconds S", "seconds to wait; a commit may take 120", least=0.1, most=86400, default=180.0),
)
def stop(args: argparse.Namespace) -> dict[str, Any]:
    """Stop a training job of this machine: its launcher gets SIGTERM, the trainers commit what they have
    and leave, and starting the same command again goes on from there. Exit status 0 once the job is gone, 1
    if it still runs after the time limit, 2 if there is no such job or it is another user's.

    Examples
    --------
      dglkge job stop runs/mine
      dglkge job stop 1f0c66a5            the job's id, or its beginning, from dglkge job list
      dglkge job stop runs/mine --now     without a commit: back to the last one
    """
    entry = _find(args.job)
    deadline = time.monotonic() + args.seconds
    _send(entry)
    if args.now and not _is_gone_by(entry, min(deadline, time.monotonic() + SECOND_SIGNAL_SECONDS)):
        _send(entry)  # a second signal ends the trainers without a commit
    if not _is_gone_by(entry, deadline):
        after = f"still runs after {args.seconds:g} s; --now ends it without a commit"
        raise JobError(f"{entry.describe()} {after}")
    return {"stopped": entry.describe(), "log_dir": entry.log_dir}


@stop.shows
def _print_stopped(job: dict[str, Any], _args: argparse.Namespace) -> None:
    print_text(f"stopped {job['stopped']}; its logs: {job['log_dir']}")


def _find(text: str) -> JobEntry:
    """Return the one job of that run, id or pid whose launcher is on this machine."""
    live = live_jobs()
    # Entries of other users may name this user's run.
    matches = jobs.matching_jobs(text, [entry for entry in live if entry.owner == os.geteuid()])
    matches = matches or jobs.matching_jobs(text, live)
    if len(matches) != 1:
        names = ", ".join(entry.run or entry.job for entry in matches or live) or "none"
        problem = "several jobs match" if matches else "no job of this machine matches"
        are = "they are" if matches else "running"
        raise InputError(f"{problem} {text!r}; {are}: {names} (dglkge job list)")
    (entry,) = matches
    if not entry.is_launched_here:
        raise InputError(f"{entry.describe()} was launched from another machine: stop it there")
    return entry


def _send(entry: JobEntry) -> None:
    """Send SIGTERM to the launcher, unless it is another user's, or in another container."""
    if jobs.process_start(entry.launcher_pid) != entry.launcher_started:
        if _is_gone_by(entry, time.monotonic()):
            return
        raise InputError(f"{entry.describe()} runs in another container: stop it there")
    try:
        # Root may signal any process, and the entry's author chose its number.
        if jobs.process_owner(entry.launcher_pid) not in (entry.owner, -1):
            raise InputError(f"{entry.describe()}: process {entry.launcher_pid} is not of the entry's owner")
        os.kill(entry.launcher_pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        raise InputError(f"{entry.describe()} is not yours to stop") from None


def _is_gone_by(entry: JobEntry, deadline: float) -> bool:
    """Wait until the job has ended; False at the deadline."""
    while any(other.job == entry.job for other in live_jobs()):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
