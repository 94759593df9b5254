"""Runs a planned job to its end: one thread that waits for output, reports, signals and clocks at once."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from dglkge.distributed.preemption import RESTART_STATUS
from dglkge.errors import FAILURE_STATUS
from dglkge.launch.console import Console, ProcessOutput, is_noise
from dglkge.launch.job_result import JobResult, ProcessResult, describe_process, describe_status, exit_status
from dglkge.launch.kept_process import Executor, KeptProcess
from dglkge.launch.process_plan import TRAINER, Limits, PlannedProcess

NOTED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_noted(noted: list[int]) -> Iterator[None]:
    """Append the numbers of Ctrl-C, SIGTERM and SIGHUP to a list instead of dying of them.

    Signals that are ignored (``nohup``) stay ignored; the handlers before come back at the end.
    """

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)

    before = {number: signal.getsignal(number) for number in NOTED_SIGNALS}
    for number in NOTED_SIGNALS:
        if before[number] != signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
AFTERMATH_SECONDS = 0.5
"""How long to look for the cause of a first failure among the processes that end right after it."""

MOST_CONNECTING = 6
"""SSH servers drop connections when more than 10 (MaxStartups) are not logged in yet."""


class Supervisor:
    """Starts the processes of a job, follows them, and ends them all when the first one fails.

    Parameters
    ----------
    executor : Executor
        Where they run.
    console : Console
        Where people read.
    log_dir : Path
        An existing folder for the logs.
    limits : Limits
    """

    def __init__(self, executor: Executor, console: Console, log_dir: Path, limits: Limits) -> None:
        self._executor = executor
        self._console = console
        self._log_dir = log_dir
        self._limits = limits
        self._selector = selectors.DefaultSelector()
        self._processes: list[KeptProcess] = []
        self._outputs: dict[str, ProcessOutput] = {}
        self._ended: list[KeptProcess] = []
        self._signals: list[int] = []
        self._has_warned_of_logs = False
        self._status = 0
        self._reason: str | None = None

    def run(self, plan: Sequence[PlannedProcess]) -> JobResult:
        """Run a job to its end; nothing of it is left when this returns or raises.

        Parameters
        ----------
        plan : sequence of PlannedProcess
            Started in this order.

        Returns
        -------
        JobResult
        """
        start = time.monotonic()
        with signals_noted(self._signals):
            try:
                self._start(plan)
                self._watch()
                self._stop()
            finally:
                self._end()
        processes = tuple(
            ProcessResult(
                process.planned.name,
                process.planned.address,
                process.pid,
                process.status,
                str(self._log_dir / process.planned.log_name),
            )
            for process in self._processes
        )
        seconds = round(time.monotonic() - start, 3)
        interrupted = bool(self._signals)
        return JobResult(self._status, self._reason, seconds, str(self._log_dir), processes, interrupted)

    def _start(self, plan: Sequence[PlannedProcess]) -> None:
        """Start all processes, or none after the first signal."""
        for planned in plan:
            self._await_logins(planned.address)
            if self._signals or any(process.status for process in self._processes):
                return
            self._outputs[planned.name] = ProcessOutput(self._log_dir / planned.log_name)
            process = self._executor.start(planned)
            self._processes.append(process)
            self._selector.register(process.output, selectors.EVENT_READ, process)
            self._selector.register(process.reports, selectors.EVENT_READ, process)

    def _await_logins(self, address: str) -> None:
        """Wait until few connections to a machine are still being made; each has a time limit of its own."""

        def is_connecting(process: KeptProcess) -> bool:
            is_open = process.is_remote and process.pid is None and process.status is None
            return is_open and process.planned.address == address

        while not self._signals and sum(map(is_connecting, self._processes)) >= MOST_CONNECTING:
            self._pump(POLL_SECONDS)

    def _watch(self) -> None:
        """Return when all trainers have ended well, one process has failed, or a signal has come."""
        trainers = [process for process in self._processes if process.planned.role == TRAINER]
        while not self._signals and not self._find_failure(trainers):
            if all(process.status == 0 for process in trainers):
                return
            self._pump(POLL_SECONDS)

    def _find_failure(self, trainers: Sequence[KeptProcess]) -> bool:
        """Look for a failure among the ended processes, in the order in which they ended."""
        for process in self._ended:
            status = process.status or 0
            is_server = process.planned.role != TRAINER
            seconds = time.monotonic() - process.noticed_at
            if status == RESTART_STATUS and not is_server:
                self._let_go(process, trainers)
                return True
            if status != 0:
                culprit = self._culprit(process)
                status = culprit.status or 0
                self._fail(culprit, describe_status(status), status)
                return True
            running = [trainer.planned.name for trainer in trainers if trainer.status is None]
            if is_server and running and seconds > self._limits.exit_seconds:
                names, limit = ", ".join(running), f"{self._limits.exit_seconds:g} s"
                self._fail(process, f"ended with status 0, and {names} still ran {limit} later", 1)
                return True
        return False

    def _culprit(self, first: KeptProcess) -> KeptProcess:
        """Return the process that the failure began with.

        One that a signal killed counts as ended only when the kernel has taken down its memory; another,
        which noticed its closed connections, may have failed before. What aborts itself may do so because
        others have gone, so that is no cause of what came first.
        """
        deadline = time.monotonic() + AFTERMATH_SECONDS
        while (first.status or 0) > 0 and time.monotonic() < deadline:
            self._pump(POLL_SECONDS / 4)
            killed = [
                each for each in self._ended if (each.status or 0) < 0 and each.status != -signal.SIGABRT
            ]
            if killed:
                return killed[0]
            if all(process.status is not None for process in self._processes):
                break
        return first

    def _let_go(self, process: KeptProcess, trainers: Sequence[KeptProcess]) -> None:
        """A trainer has committed and left, and so do the others, each in its own time."""
        planned = process.planned
        self._status = RESTART_STATUS
        who = describe_process(planned.name, process.pid, planned.address)
        self._reason = f"{who} {describe_status(RESTART_STATUS)}"
        self._console.message(self._reason)
        self._await_exits(trainers, self._limits.stop_seconds)
        if len(self._signals) == 1:  # who evicts a job tells trainers and launcher; the second one cuts short
            self._await_exits(trainers, self._limits.stop_seconds)
        uncommitted = self._uncommitted(trainers)
        if uncommitted:
            self._status = FAILURE_STATUS
            self._reason += uncommitted

    def _fail(self, process: KeptProcess, what: str, status: int) -> None:
        """Note the failure of the job and show the end of the culprit's log."""
        planned = process.planned
        if process.error is not None:
            what = (
                f"could not be started: {process.error}"
                if process.pid is None
                else f"was lost: {process.error}"
            )
        # 143 says that the state is committed, which a killed trainer or a server cannot say
        self._status = FAILURE_STATUS if exit_status(status) == RESTART_STATUS else exit_status(status)
        self._reason = f"{describe_process(planned.name, process.pid, planned.address)} {what}"
        self._pump(0.0)  # what it wrote last may still be in the pipe
        output = self._outputs[planned.name]
        lines = [
            self._reason,
            f"the end of its log, {output.log_path}:",
            *(f"    {line}" for line in output.tail),
        ]
        if output.progress:
            lines.append(f"    {output.progress}")
        self._console.message("\n".join(lines))

    def _stop(self) -> None:
        """End what still runs, as politely as the occasion allows."""
        if self._reason is None and not self._signals:
            self._await_servers()
        if self._reason is None and self._signals:
            self._interrupt()
        if self._reason is not None:
            self._send(self._processes, signal.SIGTERM)
            self._await_exits(self._processes, self._limits.failure_seconds)

    def _await_servers(self) -> None:
        """Give the servers time to leave after the last trainer; if they linger the job has not failed."""
        self._await_exits(self._processes, self._limits.exit_seconds)
        lingering = [process for process in self._processes if process.status is None]
        if self._signals or self._find_failure([]) or not lingering:
            return
        names = ", ".join(process.planned.name for process in lingering)
        limit = f"{self._limits.exit_seconds:g} s"
        self._console.message(f"warning: {names} still ran {limit} after the last trainer; ended")
        self._send(lingering, signal.SIGTERM)
        self._await_exits(lingering, self._limits.failure_seconds)

    def _interrupt(self) -> None:
        """Ask the trainers, whose servers still serve, to stop; a second signal cuts this short."""
        number = self._signals[0]
        self._reason = f"stopped by {signal.Signals(number).name}"
        limit = f"{self._limits.stop_seconds:g} s"
        self._console.message(f"{self._reason}: trainers have {limit} to commit; a second signal ends them")
        trainers = [process for process in self._processes if process.planned.role == TRAINER]
        # a closed terminal asks for what SIGTERM asks, and scripts of other projects may know that one alone
        self._send(trainers, signal.SIGTERM if number == signal.SIGHUP else number)
        self._await_exits(trainers, self._limits.stop_seconds)
        uncommitted = self._uncommitted(trainers)
        if trainers and all(process.status == 0 for process in trainers):
            self._status = 0
            self._reason += "; all trainers had ended well"
        elif trainers and not uncommitted:
            self._status = RESTART_STATUS
            self._reason += "; all trainers have committed and left"
        else:
            # status 143 would say that the state is committed
            self._status = FAILURE_STATUS if number == signal.SIGTERM else 128 + number
            self._reason += uncommitted or "; no trainer had been started"

    def _uncommitted(self, trainers: Sequence[KeptProcess]) -> str:
        """Describe the trainers that were asked to leave and did so, or will, without status 143 or 0."""
        lingering = [each.planned.name for each in trainers if each.status is None]
        died = [each for each in trainers if each.status not in (None, 0, RESTART_STATUS)]
        words = ""
        if lingering:
            words += f"; {', '.join(lingering)} had not committed by then and had to be killed"
        for process in died:
            words += f"; {process.planned.name} {describe_status(process.status or 0)} without a commit"
        return words

    def _end(self) -> None:
        """Kill what is left, wait until all keepers are gone, remove the job's shared memory.

        Each step is done whatever goes wrong in the steps before.
        """
        with contextlib.ExitStack() as last:
            last.callback(self._clean_up)
            last.callback(self._selector.close)
            for process in self._processes:
                last.callback(process.close)
            self._send(self._processes, signal.SIGKILL)
            deadline = time.monotonic() + self._limits.kill_seconds
            while time.monotonic() < deadline and self._selector.get_map():
                self._pump(POLL_SECONDS)
            for process in self._processes:
                planned = process.planned
                if not process.is_gone:
                    who = describe_process(planned.name, process.pid, planned.address)
                    self._console.message(f"warning: {who} could not be ended; its keeper goes on trying")
                self._show(process, self._outputs[planned.name].finish())

    def _clean_up(self) -> None:
        """Remove the job's shared memory on every machine."""
        segments: dict[str, set[str]] = {}
        for process in self._processes:
            segments.setdefault(process.planned.address, set()).update(process.segments)
        removed = self._executor.clean_up(segments)
        logger.debug("removed shared memory: %s", removed)

    def _await_exits(self, processes: Iterable[KeptProcess], seconds: float) -> None:
        """Wait until some processes have ended, at most so long, and only until the next signal."""
        num_signals = len(self._signals)
        deadline = time.monotonic() + seconds
        while any(process.status is None for process in processes) and time.monotonic() < deadline:
            if len(self._signals) > num_signals:
                return
            self._pump(POLL_SECONDS)

    def _send(self, processes: Iterable[KeptProcess], number: int) -> None:
        """Send a signal to those that run; SIGKILL reaches the descendants of the ended too."""
        for process in processes:
            if process.status is None or number == signal.SIGKILL:
                process.send_signal(number)

    def _pump(self, seconds: float) -> None:
        """Take in all output and reports that are there, waiting at most so long for the first."""
        ended: list[KeptProcess] = []
        for key, _ in self._selector.select(seconds):
            process: KeptProcess = key.data
            if key.fd == process.reports:
                was_running = process.status is None
                if not process.read_reports():
                    self._selector.unregister(key.fd)
                if was_running and process.status is not None:
                    ended.append(process)
            else:
                data = os.read(key.fd, 65536)
                if not data:
                    self._selector.unregister(key.fd)
                self._show(process, self._outputs[process.planned.name].feed(data))
        self._warn_of_logs()
        for process in self._processes:
            process.beat()
        self._ended.extend(sorted(ended, key=lambda process: process.ended_at))

    def _warn_of_logs(self) -> None:
        """Say once that logs cannot be written; the job goes on without them."""
        if self._has_warned_of_logs:
            return
        for output in self._outputs.values():
            if output.problem is not None:
                self._has_warned_of_logs = True
                self._console.message(
                    f"warning: the log {output.log_path} cannot be written: {output.problem}; the job "
                    "goes on, and lines that are missing there are shown here only"
                )
                return

    def _show(self, process: KeptProcess, lines: Sequence[str]) -> None:
        """Show new lines of a process, and the progress of rank 0."""
        planned = process.planned
        if planned.role == TRAINER and planned.number == 0:
            self._console.progress(planned.name, self._outputs[planned.name].progress)
        for line in lines:
            if is_noise(line):
                continue
            self._console.line(planned.name, self._processes.index(process), line)
