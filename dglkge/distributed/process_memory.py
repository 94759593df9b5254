"""Memory of processes of this machine, from ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def memory_of(pid: int, proc: Path = PROC) -> tuple[int, int]:
    """Return the resident memory of a process and the part of it that others may share; zeros if unknown.

    The shared part has mapped files and shared memory: the tables, for trainers and servers.

    Parameters
    ----------
    pid : int
    proc : Path

    Returns
    -------
    resident_bytes, shared_bytes : int
    """
    try:
        # One short read: smaps_rollup, which tells shares apart, walks the page tables of all tables.
        words = (proc / str(pid) / "statm").read_text(encoding="ascii").split()
        page = os.sysconf("SC_PAGE_SIZE")
        return int(words[1]) * page, int(words[2]) * page
    except (OSError, ValueError, IndexError):
        return 0, 0


def find_servers(job: str, proc: Path = PROC) -> dict[int, int]:
    """Return the processes of this machine that are servers of a job: number of the server to pid.

    Parameters
    ----------
    job : str
        The launcher's id of the job.
    proc : Path
    """
    found: dict[int, int] = {}
    for folder in proc.iterdir() if job else ():
        if not folder.name.isdigit():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
            continue
        own = dict(text.decode(errors="replace").split("=", 1) for text in variables if b"=" in text)
        number = own.get("DGL_SERVER_ID", "")
        if own.get("DGLKGE_JOB") != job or own.get("DGL_ROLE") != "server" or not number.isdigit():
            continue
        # Processes that a server starts inherit its variables; it was there before them.
        pid = int(folder.name)
        if int(number) not in found or _started(pid, proc) < _started(found[int(number)], proc):
            found[int(number)] = pid
    return found


def _started(pid: int, proc: Path) -> int:
    """Return the time of a process's start in the kernel's ticks; a large number if it has ended."""
    try:
        # The name, in brackets, may contain spaces: fields are counted behind it.
        return int((proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 2**63
