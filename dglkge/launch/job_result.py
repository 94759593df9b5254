"""How a job ended, in words, status and JSON; and whether and when it is started again."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable

from dglkge.distributed.preemption import RESTART_STATUS
from dglkge.errors import INPUT_ERROR_STATUS

LIKELY_CAUSES = {
    signal.SIGKILL: "kill -9, or the kernel was out of memory: see dmesg",
    signal.SIGBUS: "often /dev/shm is full: see df -h /dev/shm",
}


@dataclass(frozen=True)
class ProcessResult:
    """How one process ended.

    Attributes
    ----------
    name, address, log : str
        Which it was, where it ran, where its log lies.
    pid : int or None
        None if it never ran.
    status : int or None
        Its status, or minus the number of the signal that ended it; None if it did not end in time.
    """

    name: str
    address: str
    pid: int | None
    status: int | None
    log: str


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes
    ----------
    status : int
        Exit status of the launcher.
    reason : str or None
        What went wrong, None if nothing did.
    seconds : float
        How long the job ran.
    log_dir : str
        Folder of the logs.
    processes : tuple of ProcessResult
    is_interrupted : bool
        Whether the launcher itself was told to stop.
    """

    status: int
    reason: str | None
    seconds: float
    log_dir: str
    processes: tuple[ProcessResult, ...]
    is_interrupted: bool = False

    def to_dict(self) -> dict[str, object]:
        """Return the summary that ``--json`` prints."""
        return asdict(self)


def exit_status(status: int) -> int:
    """Return the launcher's status for that of a process: its own, or 128 + the signal, as shells do."""
    return 128 - status if status < 0 else status


def describe_status(status: int) -> str:
    """Say how a process ended, e.g. ``was killed by signal 9 (SIGKILL)``."""
    if status == RESTART_STATUS:
        return f"ended with status {status}, which says: stopped on request, start me again"
    if status >= 0:
        return f"ended with status {status}"
    number = -status
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"was killed by signal {number}"
    cause = LIKELY_CAUSES.get(signal.Signals(number))
    return f"was killed by signal {number} ({name})" + (f" [{cause}]" if cause else "")


def describe_process(name: str, pid: int | None, address: str) -> str:
    """Name a process for people, e.g. ``trainer 1 (pid 12) on 127.0.0.1``."""
    return f"{name} (pid {pid}) on {address}" if pid is not None else f"{name} on {address}"


SHORTEST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


def run_with_restarts(
    run: Callable[[int], JobResult],
    max_restarts: int,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> JobResult:
    """Run a job, and again after a failure or a stop that asks for it.

    Parameters
    ----------
    run : callable
        Runs one attempt, given its number from 0 on.
    max_restarts : int
    say : callable
        Takes messages for people.
    sleep : callable
        Waits some seconds.

    Returns
    -------
    JobResult
        Of the last attempt.
    """
    num_failures = 0
    for attempt in range(max_restarts):
        result = run(attempt)
        if not is_restartable(result):
            return result
        num_failures = 0 if result.status == RESTART_STATUS else num_failures + 1
        pause = pause_seconds(num_failures)
        say(f"attempt {attempt + 1}: {result.reason}; logs in {result.log_dir}")
        say(f"restart {attempt + 1} of {max_restarts} in {pause:g} s")
        sleep(pause)
    return run(max_restarts)


def is_restartable(result: JobResult) -> bool:
    """Tell whether to start a job again: not after success, bad input, or a signal to the launcher itself."""
    return result.status not in (0, INPUT_ERROR_STATUS) and not result.is_interrupted


def pause_seconds(num_failures: int) -> float:
    """Return the pause after so many failures in a row; doubled each time, within limits."""
    return min(LONGEST_PAUSE_SECONDS, SHORTEST_PAUSE_SECONDS * 2.0 ** max(0, min(num_failures, 10) - 1))


def attempt_log_dir(log_dir: Path, attempt: int, max_restarts: int) -> Path:
    """Return the folder of an attempt's logs: one of its own where there may be several attempts."""
    return log_dir / f"attempt-{attempt + 1}" if max_restarts else log_dir
