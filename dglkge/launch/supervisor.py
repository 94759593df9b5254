"""Runs a planned job to its end, and again after a failure or where a port was taken.

The supervisor is one loop over messages of node programs, signals and timeouts.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dglkge.distributed.addresses import PORT_TAKEN_MARK, PORT_TAKEN_STATUS
from dglkge.distributed.preemption import RESTART_STATUS
from dglkge.errors import FAILURE_STATUS, INPUT_ERROR_STATUS
from dglkge.launch.background import Report
from dglkge.launch.console import Console, ProcessOutput, is_noise, plain_text
from dglkge.launch.process_plan import Limits, PlannedProcess
from dglkge.launch.remote.connection import Events, RunningProcess
from dglkge.launch.remote.remote_site import RemoteSite
from dglkge.launch.stop_signals import signals_recorded, status_of_stop

POLL_SECONDS = 0.2
KILL_SECONDS = 10.0
"""Time from SIGKILL to the end of the processes."""

AFTERMATH_SECONDS = 0.5
"""Time after a first failure in which other ended processes may turn out to be its cause."""

SHORTEST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0

MOST_CHOICES = 5
"""Number of times that an attempt is started with other ports before it counts as failed."""

LOG_END_BYTES = 4096

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


class Supervisor:
    """Starts the processes of a job, watches them, and ends all of them when one fails."""

    def __init__(self, site: RemoteSite, console: Console, log_dir: Path, limits: Limits) -> None:
        self._site = site
        self._console = console
        self._log_dir = log_dir
        self._limits = limits
        self._events = Events()
        self._processes: list[RunningProcess] = []
        self._outputs: dict[str, ProcessOutput] = {}
        self._ended: list[RunningProcess] = []
        self._signals: list[int] = []
        self._has_warned_of_logs = False
        self._status = 0
        self._reason: str | None = None

    def run(self, plan: Sequence[PlannedProcess]) -> JobResult:
        """Run a job to its end; no process and no shared memory of it is left when this returns or raises."""
        start = time.monotonic()
        with signals_recorded(self._signals):
            try:
                if not self._signals:
                    self._start(plan)
                self._watch()
                self._stop()
            finally:
                self._end()
        results = []
        for process in self._processes:
            log = str(self._outputs[process.name].log_path)
            about = process.name, process.planned.address, process.pid, process.status
            results.append(ProcessResult(*about, log))
        seconds, log_dir = round(time.monotonic() - start, 3), str(self._log_dir)
        return JobResult(self._status, self._reason, seconds, log_dir, tuple(results), bool(self._signals))

    @property
    def _trainers(self) -> list[RunningProcess]:
        return [process for process in self._processes if process.is_trainer]

    def _start(self, plan: Sequence[PlannedProcess]) -> None:
        """Start all processes."""
        for planned in plan:
            log = self._log_dir / f"{planned.role}-{planned.number}.log"
            self._outputs[planned.name] = ProcessOutput(log, planned.name, self._console.log_format)
        # Servers come first in the plan: trainers then find them listening and need no second attempt.
        self._processes = self._site.start(plan, self._events)

    def _watch(self) -> None:
        """Wait until all trainers have succeeded, a process has failed, or a signal was received."""
        while not self._signals and not self._find_failure():
            if all(process.status == 0 for process in self._trainers):
                return
            self._process_events(POLL_SECONDS)

    def _find_failure(self) -> bool:
        """Find and record a failure among the ended processes, in the order of their ends."""
        for process in self._ended:
            status = process.status or 0
            if status == RESTART_STATUS and process.is_trainer:
                self._await_stop(process)
                return True
            if status != 0:
                failed = self._root_failure(process)
                status = failed.status or 0
                self._fail(failed, describe_status(status), status)
                return True
            running = [trainer.name for trainer in self._trainers if trainer.status is None]
            seconds = time.monotonic() - process.reported_at
            # A server leaves with status 0 once its clients have disconnected. If trainers still run long
            # after, they lost it, and DGL would let them wait without a timeout.
            if not process.is_trainer and running and seconds > self._limits.exit_seconds:
                # Status 1, because the server's own status is 0 and would count as success.
                words = f"{', '.join(running)} still ran {self._limits.exit_seconds:g} s later"
                self._fail(process, f"ended with status 0, and {words}", 1)
                return True
        return False

    def _root_failure(self, first: RunningProcess) -> RunningProcess:
        """Return the process whose failure was the cause of the first one.

        A process that was killed by a signal ends only after the kernel has released its memory. Another
        process may fail before that, because its connections were closed. SIGABRT does not count: a process
        that aborts itself may do so because others have ended. Of processes that raised, the one that printed
        its traceback first is the cause, even if it took longer to end.
        """
        deadline = time.monotonic() + AFTERMATH_SECONDS
        while (first.status or 0) > 0 and time.monotonic() < deadline:
            self._process_events(POLL_SECONDS / 4)
            for process in self._ended:
                if (process.status or 0) < 0 and process.status != -signal.SIGABRT:
                    return process
            if all(process.status is not None for process in self._processes):
                break
        if self._outputs[first.name].raised_at is None:
            return first
        raised = {
            process: at
            for process in (first, *self._ended)
            if (at := self._outputs[process.name].raised_at) is not None and (process.status or 0) > 0
        }
        return min(raised, key=lambda process: raised[process], default=first)

    def _await_stop(self, process: RunningProcess) -> None:
        """Wait for the other trainers after one has committed and left with status 143."""
        self._status = RESTART_STATUS
        self._reason = f"{process.describe()} {describe_status(RESTART_STATUS)}"
        self._console.message(self._reason)
        # A scheduler signals trainers and launcher: the first signal does not end the wait, a second does.
        self._await_exits(self._trainers, self._limits.stop_seconds, num_seen=1)
        if uncommitted := self._uncommitted():
            self._status = FAILURE_STATUS
            self._reason += uncommitted

    def _fail(self, process: RunningProcess, end: str, status: int) -> None:
        """Record the failure of the job; show the end of the log of the process that failed."""
        if process.error is not None:
            end = f"{'could not be started' if process.pid is None else 'was lost'}: {process.error}"
        # 143 means that the state is committed, which a killed trainer or a server does not imply
        self._status = FAILURE_STATUS if exit_status(status) == RESTART_STATUS else exit_status(status)
        self._reason = f"{process.describe()} {end}"
        # Its last output may still be in the pipe.
        self._process_events(0.0)
        output = self._outputs[process.name]
        # What buries the line that matters is left out, unless there is nothing else.
        tail = [line for line in output.tail if not is_noise(line)] or output.tail
        lines = [line for text in (*tail, output.progress) for line in plain_text(text).splitlines()]
        head = f"{self._reason}\nthe end of its log, {output.log_path}:"
        self._console.message("\n    ".join([head, *lines]), "error")

    def _stop(self) -> None:
        """Stop the remaining processes: SIGTERM, then, in :meth:`_end`, SIGKILL."""
        if self._reason is None and not self._signals:
            self._await_servers()
        if self._reason is None and self._signals:
            self._interrupt()
        if self._reason is not None:
            # Servers have nothing to save, and at SIGTERM DGL would abort them with a long report.
            self._send([process for process in self._processes if not process.is_trainer], signal.SIGKILL)
            self._send(self._trainers, signal.SIGTERM)
            self._await_exits(self._processes, self._limits.failure_seconds)

    def _await_servers(self) -> None:
        """Wait for the servers after the last trainer; end those that still run, with a warning."""
        self._await_exits(self._processes, self._limits.exit_seconds)
        lingering = [process for process in self._processes if process.status is None]
        if self._signals or self._find_failure() or not lingering:
            return
        words = f"still ran {self._limits.exit_seconds:g} s after the last trainer; ended"
        self._console.message(f"warning: {', '.join(process.name for process in lingering)} {words}")
        self._send(lingering, signal.SIGKILL)

    def _interrupt(self) -> None:
        """Forward a stop signal to the trainers and wait until they have committed, or for a second signal.

        Servers get no signal: trainers need them to commit.
        """
        number = self._signals[0]
        # Counted before the message: who answers it with a second signal at once must be heard.
        num_signals = len(self._signals)
        self._reason = f"stopped by {signal.Signals(number).name}"
        limit = f"{self._limits.stop_seconds:g} s"
        self._console.message(f"{self._reason}: trainers have {limit} to commit; a second signal ends them")
        trainers = self._trainers
        # SIGHUP, of a closed terminal, is sent as SIGTERM: scripts of other projects may handle that one only
        self._send(trainers, signal.SIGTERM if number == signal.SIGHUP else number)
        self._await_exits(trainers, self._limits.stop_seconds, num_signals)
        uncommitted = self._uncommitted()
        if trainers and all(process.status == 0 for process in trainers):
            self._status = 0
            self._reason += "; all trainers had ended well"
        elif trainers and not uncommitted:
            self._status = RESTART_STATUS
            self._reason += "; all trainers have committed and left"
        else:
            self._status = status_of_stop(number)
            self._reason += uncommitted or "; no trainer had been started"

    def _uncommitted(self) -> str:
        """Describe the trainers that did not end with status 143 or 0 after a stop signal."""
        words = ""
        if lingering := [trainer.name for trainer in self._trainers if trainer.status is None]:
            when = "when a second signal came" if len(self._signals) > 1 else "by then"
            words += f"; {', '.join(lingering)} had not committed {when} and had to be killed"
        for trainer in self._trainers:
            if trainer.status not in (None, 0, RESTART_STATUS):
                words += f"; {trainer.name} {describe_status(trainer.status or 0)} without a commit"
        return words

    def _end(self) -> None:
        """Kill the remaining processes, wait until all have ended, remove the job's shared memory.

        Every step runs even if an earlier one fails.
        """
        with contextlib.ExitStack() as last:
            # Callbacks run in reverse order: shared memory last, when no process maps it.
            last.callback(self._site.clean_up, {process.planned.address for process in self._processes})
            last.callback(self._events.close)
            self._send(self._processes, signal.SIGKILL)
            deadline = time.monotonic() + KILL_SECONDS
            while time.monotonic() < deadline and not all(process.is_gone for process in self._processes):
                self._process_events(POLL_SECONDS)
            for process in self._processes:
                if not process.is_gone:
                    self._console.message(f"warning: {process.describe()} could not be ended")
                self._show(process, self._outputs[process.name].finish())

    def _await_exits(self, processes: Iterable[RunningProcess], seconds: float, num_seen: int = -1) -> None:
        """Wait until some processes have ended, until the timeout, or until the next signal.

        ``num_seen`` have arrived already and do not end the wait; by default those until now.
        """
        num_seen = len(self._signals) if num_seen < 0 else num_seen
        deadline = time.monotonic() + seconds
        while any(process.status is None for process in processes) and time.monotonic() < deadline:
            if len(self._signals) > num_seen:
                return
            self._process_events(POLL_SECONDS)

    def _send(self, processes: Iterable[RunningProcess], number: int) -> None:
        """Send a signal to those that run; SIGKILL to all, as it also goes to descendants of ended ones."""
        for process in processes:
            if process.status is None or number == signal.SIGKILL:
                process.send_signal(number)

    def _process_events(self, seconds: float) -> None:
        """Process the available messages; block for at most `seconds` if there are none."""
        ended: list[RunningProcess] = []
        for process, changes in self._events.take(seconds):
            if "data" in changes:
                self._show(process, self._outputs[process.name].feed(changes["data"]))
                continue
            was_running = process.status is None
            process.apply(**changes)
            if was_running and process.status is not None:
                ended.append(process)
        # Reports of several machines come in any order. The time that their node programs measured gives the
        # order of the ends, which separates cause from consequence.
        self._ended.extend(sorted(ended, key=lambda process: process.ended_at))

    def _show(self, process: RunningProcess, lines: Sequence[str]) -> None:
        """Show new lines of a process, and the progress bar of rank 0; warn once of a log that has failed."""
        output = self._outputs[process.name]
        if output.problem is not None and not self._has_warned_of_logs:
            self._has_warned_of_logs = True
            self._console.message(
                f"warning: the log {output.log_path} cannot be written: {output.problem}; the job goes on, "
                "and lines that are missing there are shown here only"
            )
        if process.is_trainer and process.planned.number == 0:
            self._console.progress(process.name, output.progress)
        for line in lines:
            if not is_noise(line):
                self._console.line(process.name, self._processes.index(process), line)


def with_ports_chosen_again(run: Callable[[], JobResult], report: Report) -> JobResult:
    """Run an attempt of a job, and again if a port was taken between its choice and its use.

    Nothing has been trained then, so it does not count as a restart. Returns the result of the last run.
    """
    # Between the test of a port and its use another program may bind it. No test can exclude that, so the
    # attempt is repeated.
    for _ in range(MOST_CHOICES - 1):
        result = run()
        address = None if result.is_interrupted else taken_port(result)
        if address is None:
            return result
        words = "was taken by another program before the job could listen there: choosing ports again"
        report(f"{address} {words}")
    return run()


def taken_port(result: JobResult) -> str | None:
    """Return the address that a process of an ended attempt found in use; None if none did."""
    for process in result.processes:
        # The log line is checked too: a user's script may end with the same status.
        if process.status == PORT_TAKEN_STATUS:
            with contextlib.suppress(OSError):  # the disk of the logs is full
                end = Path(process.log).read_bytes()[-LOG_END_BYTES:].decode(errors="replace")
                for text in map(plain_text, end.splitlines()):  # --log_format json writes records
                    if text.startswith(PORT_TAKEN_MARK):
                        return text.removeprefix(PORT_TAKEN_MARK).strip()
    return None


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
