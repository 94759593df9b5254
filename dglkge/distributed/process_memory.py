"""Memory and start of processes of this machine, from ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def human_bytes(num_bytes: float) -> str:
    """Return a size in binary units with one decimal.

    Examples
    --------
    >>> human_bytes(900), human_bytes(1536)
    ('900 B', '1.5 KiB')
    """
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def memory_of(pid: int, proc: Path = PROC) -> tuple[int, int]:
    """Return the resident bytes of a process, and those of them that others may share; zeros if unknown.

    The shared part has mapped files and shared memory: the tables, for trainers and servers.
    """
    try:
        # One short read: smaps_rollup, which tells shares apart, walks the page tables of all tables.
        words = (proc / str(pid) / "statm").read_text(encoding="ascii").split()
        page = os.sysconf("SC_PAGE_SIZE")
        return int(words[1]) * page, int(words[2]) * page
    except (OSError, ValueError, IndexError):
        return 0, 0


def find_servers(job: str, proc: Path = PROC) -> dict[int, int]:
    """Return the processes of this machine that are servers of a job: number of the server to pid."""
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
        known = found.get(int(number))
        start, limit = process_start(pid, proc), 0 if known is None else process_start(known, proc)
        if not limit or 0 < start < limit:
            found[int(number)] = pid
    return found


def process_start(pid: int, proc: Path = PROC) -> int:
    """Return the start of a process in clock ticks since the boot; 0 if it has ended or cannot be seen."""
    try:
        # The name, in brackets, may contain spaces: fields are counted behind it.
        state, *fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        # A zombie has ended, though its parent has not yet waited for it.
        return 0 if state in "ZX" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return 0
