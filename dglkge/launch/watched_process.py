"""The launcher's end of a process and its watchdog; the executor that starts processes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Protocol, cast

from dglkge.distributed.dgl_import import TABLE_FOLDER_VARIABLE
from dglkge.distributed.world import JOB_VARIABLE
from dglkge.errors import InputError
from dglkge.launch import watchdog
from dglkge.launch.process_plan import PlannedProcess
from dglkge.launch.shared_memory import remove_job_segments, remove_stale_segments
from dglkge.launch.watchdog import HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT_SECONDS

NEVER_STARTED_STATUS = 127
LOST_STATUS = 255
REAP_SECONDS = 5.0
START_SECONDS = 30.0
"""Time until the first report of a watchdog on another machine: SSH has to connect before."""

FILES_OF_PROCESS = 4
"""Three pipes to the watchdog of a process, and its log."""

FILES_OF_LAUNCHER = 32
"""All others: standard streams, the lock on the machine, files that are read, connections that are set up."""


def allow_open_files(num_processes: int) -> None:
    """Raise this process's limit as far as a job needs it; processes that it starts inherit the limit.

    Parameters
    ----------
    num_processes : int
        Processes of the job.

    Raises
    ------
    InputError
        If the highest limit that this user may set is too low.
    """
    needed = FILES_OF_PROCESS * num_processes + FILES_OF_LAUNCHER
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(
            f"the launcher of {num_processes} processes needs {needed} open files, and the limit is {hard}: "
            "raise it (ulimit -n, LimitNOFILE of systemd), or start fewer trainers"
        )
    with contextlib.suppress(
        OSError, ValueError
    ):  # a sandbox may forbid it; then a later open shows the limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class WatchedProcess:
    """A planned process, run by a watchdog on this machine or, over a channel with three pipes, on another.

    Parameters
    ----------
    planned : PlannedProcess
    watchdog_command : sequence of str
        Command that starts the watchdog.
    folder : str
        Working folder of the process.
    program : bytes
        Bytes that the command reads before the request: the watchdog's source, if it runs on another machine.
    is_remote : bool
        Whether the watchdog runs on another machine. Then its connection may be lost without an end of file,
        so both ends send heartbeats, and process numbers are not this machine's.

    Attributes
    ----------
    pid : int or None
        Number of the process, not of the watchdog; None until it is reported.
    status : int or None
        None while it runs; then its exit status, or minus the number of the signal that ended it.
    ended_at : float
        Time of its end by its own machine's clock, in seconds since the epoch.
    reported_at : float
        Time at which the launcher received the report of the end, by the launcher's monotonic clock.
    error : str or None
        Reason why it could not be started or was lost.
    is_gone : bool
        Whether the watchdog has ended, and with it all descendants of the process.
    """

    def __init__(
        self,
        planned: PlannedProcess,
        watchdog_command: Sequence[str],
        folder: str,
        program: bytes = b"",
        is_remote: bool = False,
    ) -> None:
        self.planned = planned
        self.is_remote = is_remote
        self.pid: int | None = None
        self.status: int | None = None
        self.ended_at = 0.0
        self.reported_at = 0.0
        self.error: str | None = None
        self.is_gone = False
        self._partial = b""
        self._last_sent = self._last_received = time.monotonic()
        # A session of its own: Ctrl-C in the terminal must reach the launcher only, which forwards it.
        # Unbuffered pipes: select sees bytes only while they are in the kernel.
        pipe = subprocess.PIPE
        self._watchdog = subprocess.Popen(
            watchdog_command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
        # One JSON object a line in both directions: no framing, and any channel with three pipes will do.
        request = {
            "command": list(planned.command),
            "environment": dict(planned.environment),
            "folder": folder,
            "job": planned.environment.get(JOB_VARIABLE, ""),
            "table_folder": planned.environment.get(TABLE_FOLDER_VARIABLE, ""),
            "heartbeat_timeout": HEARTBEAT_TIMEOUT_SECONDS if is_remote else 0.0,
        }
        self._write(program + json.dumps(request).encode() + b"\n")

    @property
    def output(self) -> int:
        """File descriptor of the output of the process."""
        return cast(IO[bytes], self._watchdog.stdout).fileno()

    @property
    def reports(self) -> int:
        """File descriptor of the watchdog's reports."""
        return cast(IO[bytes], self._watchdog.stderr).fileno()

    def read_reports(self) -> bool:
        """Read and apply the watchdog's reports; False at the end of file, when the watchdog has ended."""
        data = os.read(self.reports, 65536)
        # Any bytes prove that the other end lives, also a report that is not yet complete.
        self._last_received = time.monotonic()
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._take(line)
        if not data:
            self.is_gone = True
            if self.status is None:
                self._lose()
        return bool(data)

    def send_signal(self, number: int) -> None:
        """Request a signal to the process; SIGKILL goes to all its descendants too."""
        self._write(b"%d\n" % number)

    def send_heartbeat(self) -> None:
        """Send a heartbeat to a watchdog on another machine if due; cut its connection after the timeout."""
        now = time.monotonic()
        if not self.is_remote or self.is_gone:
            return
        if now - self._last_sent >= HEARTBEAT_SECONDS:
            self._last_sent = now
            self._write(b"\n")
        # Before its first report the watchdog may still wait for a login, in which no heartbeats are sent.
        limit = START_SECONDS if self.pid is None else HEARTBEAT_TIMEOUT_SECONDS
        if now - self._last_received > limit:
            self.error = f"no heartbeat for {limit:g} s"
            self._cut()

    def close(self) -> None:
        """Close the pipes. A watchdog that still runs then ends its process, cleans up and exits."""
        # An ssh process that still runs would keep its pipes, and the pipes of others, open.
        if self.is_remote and not self.is_gone:
            self._cut()
            self.is_gone = True
        for pipe in (self._watchdog.stdin, self._watchdog.stdout, self._watchdog.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self.is_gone:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._watchdog.wait(REAP_SECONDS)

    def _take(self, line: bytes) -> None:
        """Apply one report; any other line comes from ssh, or is a traceback of the watchdog."""
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            self.error = line.decode(errors="replace").strip() or self.error
            return
        if "pid" in message:
            self.pid, self.error = message["pid"], None  # lines before it were banners of ssh
        self.error = message.get("error", self.error)
        if "status" in message:
            self.status, self.ended_at = message["status"], message["time"]
            self.reported_at = time.monotonic()

    def _lose(self) -> None:
        """Set status and error of a process that has no report of its end, but whose watchdog has ended."""
        if self.pid is None:
            self.status = NEVER_STARTED_STATUS
        else:
            self.status = LOST_STATUS
            self.error = self.error or (
                "the connection ended" if self.is_remote else "its watchdog was killed"
            )
            if self.is_remote:
                return
            # The kernel killed the process with its watchdog (PR_SET_PDEATHSIG), but not its descendants.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _cut(self) -> None:
        """Kill the local end of the connection, ssh and its children; the pipes then reach end of file."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._watchdog.pid, signal.SIGKILL)

    def _write(self, data: bytes) -> None:
        """Write to the watchdog; a closed pipe is ignored, as :meth:`read_reports` handles its end."""
        with contextlib.suppress(OSError, ValueError):
            # Unbuffered: one call may write a part only, if a signal arrives or the pipe is full.
            while data:
                data = data[cast(IO[bytes], self._watchdog.stdin).write(data) :]


class Executor(Protocol):
    """Starts the processes of a job, and removes their shared memory afterwards."""

    def start(self, planned: PlannedProcess) -> WatchedProcess:
        """Start one process under a watchdog."""
        ...

    def clean_up(self, addresses: Collection[str]) -> list[str]:
        """Remove shared memory of the ended job on some machines; return the names that were removed."""
        ...


class LocalExecutor:
    """Executor for this machine.

    Parameters
    ----------
    folder : str
        Working folder of the processes.
    job : str
        Id of the job; empty if it has no shared memory of its own names.
    """

    def __init__(self, folder: str, job: str = "") -> None:
        self._folder = folder
        self._job = job

    def start(self, planned: PlannedProcess) -> WatchedProcess:
        """Start one process under a watchdog, with the environment of the launcher."""
        # -I -S: no site-packages and no user settings, so that it starts in milliseconds
        watchdog_command = [sys.executable, "-I", "-S", str(Path(watchdog.__file__).resolve())]
        return WatchedProcess(planned, watchdog_command, self._folder)

    def clean_up(self, addresses: Collection[str]) -> list[str]:
        """Remove shared memory of the ended job."""
        return remove_job_segments(self._job) + remove_stale_segments()
