"""What a command costs: its memory and processor time, those of all its descendants included."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLE_SECONDS = 0.5
TERM_SECONDS = 30.0
LAST_LINES = 15
_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class Finished:
    """A command that has ended well.

    Attributes
    ----------
    started_at : float
        When it was started, in seconds since the epoch.
    seconds : float
        How long it ran.
    processor_seconds : float
        User and system time of all its processes.
    peak_bytes : int
        Largest sum over its processes of the proportional set size, in which a page that several processes
        share counts once.
    """

    started_at: float
    seconds: float
    processor_seconds: float
    peak_bytes: int


def proportional_bytes(rollup: bytes) -> int:
    """Return the proportional set size in ``/proc/PID/smaps_rollup``; 0 if none (man 5 proc_pid_smaps)."""
    found = _PSS.search(rollup)
    return 1024 * int(found.group(1)) if found else 0


def total_proportional_bytes(pids: Sequence[int]) -> int:
    """Sum the proportional set sizes of processes; one that has ended counts nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += proportional_bytes(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
    return total


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def run_watched(
    command: Sequence[str], log: Path, limit_seconds: float, variables: Mapping[str, str] | None = None
) -> Finished:
    """Run a command to its end and watch what it costs.

    Parameters
    ----------
    command : sequence of str
    log : Path
        File for what it writes to stdout and stderr.
    limit_seconds : float
    variables : mapping, optional
        Added to this process's environment.

    Raises
    ------
    RuntimeError
        If it fails or takes too long; all its processes are then ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    before = _processor_seconds()
    started_at, start, peak = time.time(), time.monotonic(), 0
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(variables or {})}
        )
    try:
        while process.poll() is None:
            peak = max(peak, total_proportional_bytes(family(process.pid)))
            if time.monotonic() - start > limit_seconds:
                raise RuntimeError(f"{command[0]} ran for more than {limit_seconds:g} s; its log is {log}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SAMPLE_SECONDS)
    finally:
        _end(process)
    seconds = time.monotonic() - start
    if process.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        raise RuntimeError("\n".join([f"{' '.join(command)}\nended with {process.returncode}:", *lines]))
    return Finished(started_at, seconds, _processor_seconds() - before, peak)


def _processor_seconds() -> float:
    """Return the processor time of all children that this process has waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and its descendants, if any of them still runs."""
    if process.poll() is not None:
        return
    pids = family(process.pid)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TERM_SECONDS)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
