"""Starting a job again: when, how often, and after which pause."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Callable

from dglkge.distributed.preemption import RESTART_STATUS
from dglkge.errors import INPUT_ERROR_STATUS
from dglkge.launch.job_result import JobResult

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
