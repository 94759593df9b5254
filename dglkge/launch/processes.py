"""Processes of this machine, read from ``/proc``."""

from __future__ import annotations

import contextlib
import os


def process_parents() -> dict[int, int]:
    """Return the parent of each process (man 5 proc_pid_stat: the fourth field)."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
                # the second field is the name in parentheses, which may contain spaces and parentheses
                parents[int(entry)] = int(stat.read().rpartition(b")")[2].split()[1])
    return parents


def has_variable(pid: int, name: str, value: str) -> bool:
    """Whether a process was started with a variable; False if it has ended or is another user's."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environment:
        return f"{name}={value}".encode() in environment.read().split(b"\0")
    return False


def kill(pid: int, number: int) -> None:
    """Send a signal; ignores a process that has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
