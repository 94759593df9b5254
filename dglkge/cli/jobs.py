"""``dglkge jobs``: the training jobs of this machine, from the register that their launchers keep."""

from __future__ import annotations

import argparse
import shlex
import time
from typing import Any

from dglkge.cli.common import add_options, human_bytes, print_columns, print_json, print_text
from dglkge.distributed.jobs import JobEntry, allocated_bytes, live_jobs

DESCRIPTION = """List the jobs that dglkge-launch and dglkge train run on this machine, of all users: who
started them, their run folder, and the memory that they have planned. Jobs in containers with a /dev/shm of
their own are not seen from here."""
EXAMPLES = """examples:
  dglkge jobs
  dglkge jobs --json
  dglkge stop runs/mine"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_options(parser, "json")


def run(args: argparse.Namespace) -> int:
    """Print the jobs."""
    jobs = live_jobs()
    if args.json:
        print_json([_report(entry) for entry in jobs])
    elif not jobs:
        print_text("no job runs on this machine")
    else:
        header = ["job", "user", "launcher", "started", "memory", "/dev/shm", "run or script"]
        print_columns(header, [_row(entry) for entry in jobs])
    return 0


def _report(entry: JobEntry) -> dict[str, Any]:
    """Return a job as JSON has it."""
    return {
        **entry.to_dict(),
        "allocated_shared_memory_bytes": allocated_bytes(entry.job),
        "is_launched_here": entry.is_launched_here,
    }


def _row(entry: JobEntry) -> list[str]:
    """Return the line of a job."""
    where = f"pid {entry.launcher_pid}" + ("" if entry.is_launched_here else f" on {entry.host or '?'}")
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.started))
    planned = human_bytes(entry.memory_bytes) if entry.memory_bytes else "unknown"
    segments = human_bytes(allocated_bytes(entry.job))
    if entry.shared_memory_bytes:
        segments += f" of {human_bytes(entry.shared_memory_bytes)}"
    what = entry.run or shlex.join(entry.command)
    return [entry.job, entry.user, where, started, planned, segments, what]
