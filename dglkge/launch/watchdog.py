"""Watchdog of one process of a job: its parent, which ends it if the launcher ends or the connection is lost.

This file is a program of its own. It needs the standard library only and is run by its path, so it starts in
milliseconds and works over any channel that carries stdin, stdout and stderr.

stdin
    The first line is the request in JSON: ``command``, ``environment`` (added to the watchdog's own),
    ``folder`` to run in, ``job`` (its id, which begins the names of its shared memory), ``table_folder`` (its
    tables, if they are files) and ``heartbeat_timeout`` in seconds (0 for a pipe on one machine, which always
    reaches an end of file). Each further line is a signal number: SIGKILL goes to the process and all its
    descendants, others to the process alone. An empty line is a heartbeat. After an end of file, or without a
    line for ``heartbeat_timeout``, the launcher counts as dead.
stdout
    Output of the process and its descendants, stderr included.
stderr
    One JSON object a line: ``{"pid": 12}`` once the process runs, ``{"status": 0, "time": ...}`` at its end
    (minus the number of the signal that ended it), ``{"error": "..."}`` if it could not be started, and
    ``{}`` every HEARTBEAT_SECONDS as a heartbeat if there is a ``heartbeat_timeout``.

While the process runs, the watchdog holds a lock on a record in the folder of shared memory, which has the
job's id. A record without a lock belongs to a watchdog that was killed: the next job removes what that job
has left (``shared_memory.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

SHARED_MEMORY_FOLDER = "/dev/shm"
RECORD_PREFIX = "dglkge-watchdog-"
ENTRY_PREFIX, ENTRY_SUFFIX = "dglkge-job-", ".json"
"""As dglkge/distributed/jobs.py has them: this program imports nothing of ours."""
POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
"""From SIGTERM to SIGKILL if the launcher is dead."""
HEARTBEAT_SECONDS = 2.0
"""Interval of heartbeats in both directions, over connections that may be lost without an end of file."""
HEARTBEAT_TIMEOUT_SECONDS = 12.0
"""Without a heartbeat for this time the other end counts as dead."""
KILL_LIMIT_SECONDS = 5.0
"""Time for processes to end after SIGKILL; one that a dead disk blocks in the kernel is then left alone."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def descendants(root: int) -> list[int]:
    """Return all descendants of a process (man 5 proc_pid_stat: the parent is the fourth field)."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
                # the second field is the name in parentheses, which may contain spaces and parentheses
                parent = int(stat.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    below = list(children.get(root, []))
    while below:
        pid = below.pop()
        found.append(pid)
        below.extend(children.get(pid, []))
    return found


class Record:
    """File beside the shared memory with the id of a job; locked while the watchdog lives.

    If it cannot be written (no room), the watchdog works without it.

    Parameters
    ----------
    job : str
        Id of the job; empty if unknown.
    """

    def __init__(self, job: str = "") -> None:
        name = f"{RECORD_PREFIX}{os.getpid()}-{time.time_ns()}"
        self._path = os.path.join(SHARED_MEMORY_FOLDER, name)
        unlocked = os.path.join(SHARED_MEMORY_FOLDER, f".{name}")
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._descriptor, json.dumps({"job": job}).encode())
            # After the lock: an unlocked record counts as that of a killed watchdog.
            os.rename(unlocked, self._path)

    def remove(self) -> None:
        """Remove the record: there is nothing left to clean up."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(self._descriptor)
            self._descriptor = None


class Watchdog:
    """Starts and watches one process and its descendants.

    Parameters
    ----------
    heartbeat_timeout : float
        Seconds without a line from the launcher after which it counts as dead; 0: never.
    job : str
        Id of the job, which begins the names of its own shared memory; empty if there are none.
    table_folder : str
        Folder of the job's tables, if they are files.
    """

    def __init__(self, heartbeat_timeout: float = 0.0, job: str = "", table_folder: str = "") -> None:
        self._heartbeat_timeout = heartbeat_timeout
        self._last_received = self._last_sent = time.monotonic()
        self._job = job
        self._own_prefix = f"dglkge-{job}-" if job else ""
        self._table_folder = table_folder
        self._record = Record(job)
        self._pid = 0
        self._status: int | None = None
        self._input = b""
        self._wakeup = os.pipe()

    def start(self, command: list[str], environment: dict[str, str], folder: str) -> None:
        """Start the process in a session of its own; the kernel kills it if this watchdog dies.

        As a subreaper the watchdog becomes the parent of orphaned descendants.

        Raises
        ------
        OSError
            If the program or the folder does not exist.
        """
        # Orphans of the process become children of this watchdog, so that it finds and ends them.
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for end in self._wakeup:
            os.set_blocking(end, False)
        # Python writes the number of each signal to this pipe, so that select wakes up when a child has
        # ended.
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        # Empty handlers instead of SIG_IGN: an ignored signal would be inherited by the process.
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        watchdog = os.getpid()

        def die_with_watchdog() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != watchdog:  # the watchdog died before prctl took effect
                os._exit(1)

        # A session of its own: signals of a terminal reach the launcher only, and killpg reaches all of the
        # process's group.
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_watchdog,
        )
        self._pid = process.pid
        process.returncode = 0  # set, because _reap() waits for it together with the orphans
        report(pid=self._pid)

    def watch(self) -> None:
        """Wait until the process has ended or the launcher counts as dead; then end all descendants."""
        while self._status is None:
            seconds = HEARTBEAT_SECONDS if self._heartbeat_timeout else None
            ready, _, _ = select.select([0, self._wakeup[0]], [], [], seconds)
            if self._wakeup[0] in ready:
                os.read(self._wakeup[0], 4096)
            self._reap()
            if (0 in ready and not self._read_requests()) or self._has_timed_out():
                self._replace_launcher()
                return
        self._end_descendants(signal.SIGTERM)

    def close(self) -> None:
        """Remove the record of this watchdog; the last step."""
        self._record.remove()

    def _read_requests(self) -> bool:
        """Send the signals that the launcher requested; False at the end of file."""
        try:
            data = os.read(0, 4096)
        except OSError:  # the channel was reset
            return False
        self._last_received = time.monotonic()
        *lines, self._input = (self._input + data).split(b"\n")
        for line in filter(None, lines):
            self._send(int(line))
        return bool(data)

    def _has_timed_out(self) -> bool:
        """Send a heartbeat if one is due; return whether the launcher's heartbeats have timed out."""
        now = time.monotonic()
        if self._heartbeat_timeout and now - self._last_sent >= HEARTBEAT_SECONDS:
            self._last_sent = now
            report()
        return 0 < self._heartbeat_timeout < now - self._last_received

    def _send(self, number: int) -> None:
        """Send a signal to the process, and SIGKILL to all its descendants too."""
        # SIGTERM and SIGINT go to the process alone, which decides what they mean to its children.
        targets = descendants(os.getpid()) if number == signal.SIGKILL else [self._pid]
        if self._status is None or number == signal.SIGKILL:
            for pid in targets:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def _reap(self) -> None:
        """Wait for ended processes, orphans included; report the status of the main one."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    self._status = os.waitstatus_to_exitcode(status)
                    report(status=self._status, time=time.time())

    def _end_descendants(self, number: int) -> None:
        """Send a signal to all remaining descendants; SIGKILL after GRACE_SECONDS."""
        start = time.monotonic()
        while True:
            self._reap()
            left = descendants(os.getpid())
            seconds = time.monotonic() - start
            if not left or seconds > GRACE_SECONDS + KILL_LIMIT_SECONDS:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number if seconds < GRACE_SECONDS else signal.SIGKILL)
            if number != signal.SIGKILL:
                number = 0  # 0 sends nothing: the first signal is sent once
            time.sleep(POLL_SECONDS)

    def _replace_launcher(self) -> None:
        """End all processes and remove the shared memory in place of the launcher, which is dead."""
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while self._status is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._reap()
        self._send(signal.SIGKILL)
        self._end_descendants(signal.SIGKILL)
        self._remove_tables()
        # No launcher is left to do this; :mod:`dglkge.launch.shared_memory` does it otherwise.
        for name in self._own_segments():
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(SHARED_MEMORY_FOLDER, name))
        self._remove_entry()

    def _remove_entry(self) -> None:
        """Remove the job's entry in the machine's register, unless its launcher or agent still holds it."""
        if not self._own_prefix:
            return
        path = os.path.join(SHARED_MEMORY_FOLDER, f"{ENTRY_PREFIX}{self._job}{ENTRY_SUFFIX}")
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)

    def _remove_tables(self) -> None:
        """Remove the folder of the job's tables. Processes that still map files of it keep them."""
        if self._table_folder:
            shutil.rmtree(self._table_folder, ignore_errors=True)

    def _own_segments(self) -> list[str]:
        """Return the names in shared memory that begin with the job's id."""
        with contextlib.suppress(OSError):
            names = os.listdir(SHARED_MEMORY_FOLDER)
            return [name for name in names if self._own_prefix and name.startswith(self._own_prefix)]
        return []


def report(**message: object) -> None:
    """Write a report to the launcher; ignores a closed pipe."""
    with contextlib.suppress(OSError):
        os.write(2, json.dumps(message).encode() + b"\n")


def read_request() -> dict | None:
    """Read the first line of stdin; None at an end of file before it is complete."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # one at a time: further bytes belong to the loop
        if not byte:
            return None
        line += byte
    return json.loads(line)


def main() -> int:
    """Run one process as requested on stdin. Results are in the reports, not in the exit status."""
    request = read_request()
    if request is None:
        return 1
    watchdog = Watchdog(
        request.get("heartbeat_timeout", 0.0),
        request.get("job", ""),
        request.get("table_folder", ""),
    )
    try:
        watchdog.start(request["command"], request["environment"], request["folder"])
        watchdog.watch()
    except OSError as error:
        report(error=str(error))
        return 1
    finally:
        watchdog.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
