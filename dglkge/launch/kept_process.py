"""A running process as the launcher sees it, and the executor that starts processes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol, cast

from dglkge.launch import keeper
from dglkge.launch.keeper import BEAT_SECONDS, SILENCE_SECONDS
from dglkge.launch.process_plan import PlannedProcess
from dglkge.launch.shared_memory import remove_job_segments, remove_leftovers, segment_names

NEVER_STARTED_STATUS = 127
LOST_STATUS = 255
REAP_SECONDS = 5.0
START_SECONDS = 30.0
"""How long a keeper on another machine may take to report for the first time."""


class KeptProcess:
    """A planned process and the keeper that runs it, here or, over any channel with three pipes, elsewhere.

    Parameters
    ----------
    planned : PlannedProcess
    keeper_command : sequence of str
        What starts the keeper.
    folder : str
        Where the process runs.
    protected_segments : collection of str
        Shared memory that was there before the job.
    program : bytes
        What the keeper's command reads before the request: its own source, where it runs elsewhere.
    is_remote : bool
        Whether the keeper runs on another machine, so that it may go silent without an end of its pipes, and
        process numbers are not this machine's.

    Attributes
    ----------
    pid : int or None
        Number of the process itself, not of the keeper; None until it is known.
    status : int or None
        None while it runs; then its status, or minus the number of the signal that ended it.
    ended_at : float
        When it ended by its own machine's clock, in seconds since the epoch.
    noticed_at : float
        When the launcher was told so, by its monotonic clock.
    error : str or None
        Why it could not be started, or how it was lost.
    is_gone : bool
        Whether the keeper and with it all descendants of the process have ended.
    segments : set of str
        Shared memory seen with it.
    """

    def __init__(
        self,
        planned: PlannedProcess,
        keeper_command: Sequence[str],
        folder: str,
        protected_segments: Collection[str],
        program: bytes = b"",
        is_remote: bool = False,
    ) -> None:
        self.planned = planned
        self.is_remote = is_remote
        self.pid: int | None = None
        self.status: int | None = None
        self.ended_at = 0.0
        self.noticed_at = 0.0
        self.error: str | None = None
        self.is_gone = False
        self.segments: set[str] = set()
        self._partial = b""
        self._last_beat = self._last_heard = time.monotonic()
        pipe = subprocess.PIPE
        self._keeper = subprocess.Popen(
            keeper_command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
        request = {
            "command": list(planned.command),
            "environment": dict(planned.environment),
            "folder": folder,
            "protected_segments": sorted(protected_segments),
            "silence_seconds": SILENCE_SECONDS if is_remote else 0.0,
        }
        self._write(program + json.dumps(request).encode() + b"\n")

    @property
    def output(self) -> int:
        """File descriptor of what the process writes."""
        return cast(IO[bytes], self._keeper.stdout).fileno()

    @property
    def reports(self) -> int:
        """File descriptor of what the keeper reports."""
        return cast(IO[bytes], self._keeper.stderr).fileno()

    def read_reports(self) -> bool:
        """Take in what the keeper reported; False at the end, when the keeper is gone."""
        data = os.read(self.reports, 65536)
        self._last_heard = time.monotonic()
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._take(line)
        if not data:
            self.is_gone = True
            if self.status is None:
                self._lose()
        return bool(data)

    def send_signal(self, number: int) -> None:
        """Have the keeper send a signal; SIGKILL reaches all descendants too."""
        self._write(b"%d\n" % number)

    def beat(self) -> None:
        """Tell a keeper on another machine that the launcher is there; cut the channel to one long silent."""
        now = time.monotonic()
        if not self.is_remote or self.is_gone:
            return
        if now - self._last_beat >= BEAT_SECONDS:
            self._last_beat = now
            self._write(b"\n")
        limit = START_SECONDS if self.pid is None else SILENCE_SECONDS
        if now - self._last_heard > limit:
            self.error = f"nothing was heard of it for {limit:g} s"
            self._cut()

    def close(self) -> None:
        """Let go of the keeper: one that still runs ends its process, clears up and goes."""
        if self.is_remote and not self.is_gone:
            self._cut()
            self.is_gone = True
        for pipe in (self._keeper.stdin, self._keeper.stdout, self._keeper.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self.is_gone:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.wait(REAP_SECONDS)

    def _take(self, line: bytes) -> None:
        """Take in one report; other lines are words of the channel or a traceback of the keeper."""
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            self.error = line.decode(errors="replace").strip() or self.error
            return
        if "pid" in message:
            self.pid, self.error = message["pid"], None  # words before were greetings of the channel
        self.segments.update(message.get("segments", ()))
        self.error = message.get("error", self.error)
        if "status" in message:
            self.status, self.ended_at = message["status"], message["time"]
            self.noticed_at = time.monotonic()

    def _lose(self) -> None:
        """The keeper is gone and has not said how the process ended."""
        if self.pid is None:
            self.status = NEVER_STARTED_STATUS
        else:
            self.status = LOST_STATUS
            self.error = self.error or ("the connection ended" if self.is_remote else "its keeper was killed")
            if self.is_remote:
                return
            # the process died with its keeper, but what it had started did not
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _cut(self) -> None:
        """End the channel to another machine, with whatever it has started here; the pipes then end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._keeper.pid, signal.SIGKILL)

    def _write(self, data: bytes) -> None:
        """Write to the keeper, whose end is noticed elsewhere."""
        with contextlib.suppress(OSError, ValueError):
            cast(IO[bytes], self._keeper.stdin).write(data)


class Executor(Protocol):
    """Where the processes of a job run."""

    def start(self, planned: PlannedProcess) -> KeptProcess:
        """Start one process under a keeper."""
        ...

    def clean_up(self, segments: Mapping[str, set[str]]) -> list[str]:
        """Remove the shared memory that the ended job has left, by machine; return its names."""
        ...


class LocalExecutor:
    """This machine.

    Parameters
    ----------
    folder : str
        Where the processes run.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._before = segment_names()

    def start(self, planned: PlannedProcess) -> KeptProcess:
        """Start one process under a keeper, with the environment of the launcher."""
        # -I -S: the keeper neither needs nor waits for anything of the user's Python
        keeper_command = [sys.executable, "-I", "-S", str(Path(keeper.__file__).resolve())]
        return KeptProcess(planned, keeper_command, self._folder, self._before)

    def clean_up(self, segments: Mapping[str, set[str]]) -> list[str]:
        """Remove the shared memory that the ended job has left."""
        return remove_job_segments(set().union(*segments.values()), self._before) + remove_leftovers()
