"""Result of a job: status, description, JSON; and the rule by which it is started again."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dglkge.distributed.preemption import RESTART_STATUS
from dglkge.errors import INPUT_ERROR_STATUS
from dglkge.launch.background import Report

LIKELY_CAUSES = {
    signal.SIGKILL: "kill -9, or the kernel was out of memory: see dmesg",
    signal.SIGBUS: "often /dev/shm is full: see df -h /dev/shm",
}


@dataclass(frozen=True)
class ProcessResult:
    """Result of one process.

    `pid` is None if it was never started; `status` is its exit status, or minus the number of the signal that
    ended it; None if it did not end in time.
    """

    name: str
    address: str
    pid: int | None
    status: int | None
    log: str


@dataclass(frozen=True)
class JobResult:
    """Result of a job: exit status of the launcher, a reason unless it succeeded, run time, logs.

    `is_interrupted`: the launcher itself has received a stop signal.
    """

    status: int
    reason: str | None
    seconds: float
    log_dir: str
    processes: tuple[ProcessResult, ...]
    is_interrupted: bool = False


def exit_status(status: int) -> int:
    """Convert the status of a process to an exit status: 128 + the number for signals, as shells do."""
    return 128 - status if status < 0 else status


def describe_status(status: int) -> str:
    """Describe the end of a process, e.g. ``was killed by signal 9 (SIGKILL)``."""
    if status == RESTART_STATUS:
        return f"ended with status {status}, which says: stopped on request, start me again"
    if status >= 0:
        return f"ended with status {status}"
    words = f"was killed by signal {-status}"
    with contextlib.suppress(ValueError):  # real-time signals have no name in Python's enumeration
        number = signal.Signals(-status)
        words += f" ({number.name})" + (f" [{LIKELY_CAUSES[number]}]" if number in LIKELY_CAUSES else "")
    return words


SHORTEST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


def run_with_restarts(run: Callable[[int], JobResult], max_restarts: int, report: Report) -> JobResult:
    """Run a job, and again after a failure or a stop with status 143; return the result of the last attempt.

    `run` takes the number of the attempt, from 0 on.
    """
    num_failures = 0
    for attempt in range(max_restarts):
        result = run(attempt)
        if not is_restartable(result):
            return result
        # A stop with status 143 is no failure: a preempted job restarts after the shortest pause.
        num_failures = 0 if result.status == RESTART_STATUS else num_failures + 1
        pause = pause_seconds(num_failures)
        report(f"attempt {attempt + 1}: {result.reason}; logs in {result.log_dir}")
        report(f"restart {attempt + 1} of {max_restarts} in {pause:g} s")
        time.sleep(pause)
    # The last attempt is outside of the loop: its result is returned whatever it is.
    return run(max_restarts)


def is_restartable(result: JobResult) -> bool:
    """Whether to start a job again: not after success, bad input, or a signal to the launcher itself."""
    return result.status not in (0, INPUT_ERROR_STATUS) and not result.is_interrupted


def pause_seconds(num_failures: int) -> float:
    """Return the pause after a number of failures in a row; doubled for each, within limits."""
    return min(LONGEST_PAUSE_SECONDS, SHORTEST_PAUSE_SECONDS * 2.0 ** max(0, min(num_failures, 10) - 1))


def attempt_log_dir(log_dir: Path, attempt: int, max_restarts: int) -> Path:
    """Return the log folder of an attempt: a folder of its own if there may be several attempts."""
    return log_dir / f"attempt-{attempt + 1}" if max_restarts else log_dir
