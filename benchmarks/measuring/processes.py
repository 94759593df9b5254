"""Cost of a command: memory and processor time, those of all its descendants included."""

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

import numpy as np
import psutil

SAMPLE_SECONDS = 1.0
SAMPLE_SHARE = 0.02
"""Share of a core's time that samples take at most."""
TERM_SECONDS = 30.0
LAST_LINES = 15
_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class Finished:
    """A command that has ended well.

    Attributes
    ----------
    started_at : float
        Time of the start, in seconds since the epoch.
    seconds : float
        Run time.
    processor_seconds : float
        User and system time of all its processes.
    peak_bytes : int
        Largest sum over its processes of the proportional set size, in which a page that several processes
        share counts once.
    processor_samples : sequence of (float, float)
        Moments, in seconds since the epoch, and the processor time that the processes then alive had used.
    """

    started_at: float
    seconds: float
    processor_seconds: float
    peak_bytes: int
    processor_samples: Sequence[tuple[float, float]] = ()

    def processor_seconds_between(self, start: float, end: float) -> float:
        """Return the processor time used between two moments, interpolated."""
        moments, seconds = zip(*self.processor_samples)
        return float(np.diff(np.interp([start, end], moments, seconds))[0])


def proportional_bytes(rollup: bytes) -> int:
    """Return the proportional set size in ``/proc/PID/smaps_rollup``; 0 if none (man 5 proc_pid_smaps)."""
    match = _PSS.search(rollup)
    return 1024 * int(match.group(1)) if match else 0


def total_proportional_bytes(pids: Sequence[int]) -> int:
    """Sum the proportional set sizes of processes; one that has ended counts nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += proportional_bytes(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
    return total


def total_processor_seconds(pids: Sequence[int]) -> float:
    """Sum the user and system time of processes; one that has ended counts nothing."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
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
    """Run a command to its end and measure its cost.

    Parameters
    ----------
    command : sequence of str
    log : Path
        File for its stdout and stderr.
    limit_seconds : float
    variables : mapping, optional
        Added to this process's environment.

    Raises
    ------
    RuntimeError
        If it fails or takes too long; all its processes are then ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    # Children that have been waited for are counted by the kernel, so the difference is exact. Samples would
    # miss short processes.
    before = _processor_seconds()
    started_at, start, peak = time.time(), time.monotonic(), 0
    samples: list[tuple[float, float]] = []
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(variables or {})}
        )
    try:
        while process.poll() is None:
            # Memory is sampled: the kernel keeps no peak of the sum over processes. It walks over all their
            # pages for it, so large ones are sampled more seldom.
            before_sample = time.process_time()
            pids = family(process.pid)
            peak = max(peak, total_proportional_bytes(pids))
            samples.append((time.time(), total_processor_seconds(pids)))
            if time.monotonic() - start > limit_seconds:
                raise RuntimeError(f"{command[0]} ran for more than {limit_seconds:g} s; its log is {log}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(SAMPLE_SECONDS, (time.process_time() - before_sample) / SAMPLE_SHARE))
    finally:
        _end(process)
    seconds = time.monotonic() - start
    if process.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        raise RuntimeError("\n".join([f"{' '.join(command)}\nended with {process.returncode}:", *lines]))
    return Finished(started_at, seconds, _processor_seconds() - before, peak, samples)


def _processor_seconds() -> float:
    """Return the processor time of all children that this process has waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and its descendants, if any of them still runs."""
    if process.poll() is not None:
        return
    # Listed before the signal: later, orphans could not be found by their parent.
    pids = family(process.pid)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TERM_SECONDS)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
