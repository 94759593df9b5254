"""Keeps one process of a job, where it runs: the parent that notices when the launcher is gone.

This file is a program of its own. It needs the standard library only and is run by its path, so that it
starts in milliseconds and works through any channel that carries stdin, stdout and stderr.

stdin
    One line of JSON, the request: ``command``, ``environment`` (added to the keeper's own), ``folder`` to run
    in, ``protected_segments`` (shared memory that was there before the job), ``silence_seconds`` (0: stdin is
    a pipe, whose end always comes). Then one signal number per line; SIGKILL goes to the process and all its
    descendants, any other to the process alone; an empty line only says that the launcher is there. End of
    file, or nothing for ``silence_seconds``: the launcher is gone.
stdout
    What the process and its descendants write to stdout and stderr.
stderr
    One JSON object per line: ``{"pid": 12}`` once it runs, ``{"segments": [...]}`` for shared memory newly
    seen with it, ``{"status": 0, "time": ...}`` when it has ended (minus the signal's number if one ended
    it), or ``{"error": "..."}`` if it could not be started; with ``silence_seconds``, ``{}`` every
    BEAT_SECONDS.

While it runs it has a locked record in the folder of shared memory, which names the segments it has seen.
A record without a lock is that of a keeper that was killed: the next job removes what it names
(``shared_memory.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time

SHARED_MEMORY_FOLDER = "/dev/shm"
RECORD_PREFIX = "dglkge-keeper-"
SCAN_SECONDS = 1.0
SELDOM_SCAN_SECONDS = 16.0
SCAN_GROWTH = 1.25
"""Shared memory is made at the start: the longer nothing new is seen, the less often the keeper looks."""
POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
"""From SIGTERM to SIGKILL where the keeper decides by itself."""
BEAT_SECONDS = 2.0
"""How often keeper and launcher tell each other that they are there, over a channel that may go silent."""
SILENCE_SECONDS = 12.0
"""After so long without a word the other side counts as gone; with GRACE_SECONDS well below 20."""
KILL_LIMIT_SECONDS = 5.0
"""Processes that outlive SIGKILL for so long (in a call of a dead disk, say) are given up."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def mapped_segments(pid: int) -> set[str]:
    """Return the names of the shared memory that a process has mapped; none if it is gone or foreign."""
    prefix = SHARED_MEMORY_FOLDER + "/"
    names = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
        for line in maps:
            path = os.fsdecode(line[line.find(b"/") :].rstrip(b"\n"))
            if path.startswith(prefix) and not path.endswith(" (deleted)"):
                names.add(path[len(prefix) :])
    return names


def descendants(root: int) -> list[int]:
    """Return all processes below a process (man 5 proc_pid_stat: the parent is the fourth field)."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
                # the second field, the name in parentheses, may hold anything
                parent = int(stat.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    below = list(children.get(root, []))
    while below:
        pid = below.pop()
        found.append(pid)
        below.extend(children.get(pid, []))
    return found


def segment_inode(name: str) -> int:
    """Return the inode of a segment, which tells it from a later one of the same name; 0 if there is none."""
    try:
        return os.stat(os.path.join(SHARED_MEMORY_FOLDER, name)).st_ino
    except OSError:
        return 0


class Record:
    """What a keeper would leave if it were killed: a file beside the shared memory, locked while it lives.

    Where it cannot be written (no room), the keeper goes on without.

    Parameters
    ----------
    protected_segments : iterable of str
        Shared memory that was there before the job.
    """

    def __init__(self, protected_segments: set[str]) -> None:
        self._protected = sorted(protected_segments)
        name = f"{RECORD_PREFIX}{os.getpid()}-{time.time_ns()}"
        self._path = os.path.join(SHARED_MEMORY_FOLDER, name)
        unlocked = os.path.join(SHARED_MEMORY_FOLDER, f".{name}")
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.write({})
            os.rename(unlocked, self._path)  # without its lock it would count as that of a killed keeper

    def write(self, segments: dict[str, int]) -> None:
        """Write the segments that were seen, and the inode of each."""
        text = json.dumps({"protected": self._protected, "segments": segments})
        with contextlib.suppress(OSError):
            if self._descriptor is not None:
                os.pwrite(self._descriptor, text.encode(), 0)
                os.ftruncate(self._descriptor, len(text))

    def remove(self) -> None:
        """Remove the record: nothing is left to clear."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(self._descriptor)
            self._descriptor = None


class Keeper:
    """One process, its descendants and the shared memory that they made.

    Parameters
    ----------
    protected_segments : iterable of str
        Shared memory that is not the job's.
    silence_seconds : float
        How long the launcher may be silent; 0: for ever.
    """

    def __init__(self, protected_segments: list[str], silence_seconds: float = 0.0) -> None:
        self._protected = set(protected_segments)
        self._silence_seconds = silence_seconds
        self._last_heard = self._last_beat = time.monotonic()
        self._segments: dict[str, int] = {}
        self._record = Record(self._protected)
        self._pid = 0
        self._status: int | None = None
        self._next_scan = 0.0
        self._scan_seconds = SCAN_SECONDS
        self._input = b""
        self._wakeup = os.pipe()

    def start(self, command: list[str], environment: dict[str, str], folder: str) -> None:
        """Start the process in a session of its own; it dies with this keeper, its orphans come to it.

        Raises
        ------
        OSError
            If the program or the folder does not exist.
        """
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for end in self._wakeup:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        # handlers, not SIG_IGN: those would be inherited by the process
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        keeper = os.getpid()

        def die_with_keeper() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != keeper:  # it died before the line above
                os._exit(1)

        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_keeper,
        )
        self._pid = process.pid
        process.returncode = 0  # reaped by _reap(), together with the orphans
        report(pid=self._pid)

    def watch(self) -> None:
        """Stay until the process has ended, or the launcher is gone; leave nothing behind."""
        while self._status is None:
            seconds = max(0.0, self._next_scan - time.monotonic())
            if self._silence_seconds:
                seconds = min(seconds, BEAT_SECONDS)
            ready, _, _ = select.select([0, self._wakeup[0]], [], [], seconds)
            if self._wakeup[0] in ready:
                os.read(self._wakeup[0], 4096)
            self._reap()
            if time.monotonic() >= self._next_scan:
                self._scan()
            if (0 in ready and not self._obey()) or self._is_forsaken():
                self._abandon()
                return
        self._end_descendants(signal.SIGTERM)

    def close(self) -> None:
        """Remove the record of this keeper, last of all."""
        self._record.remove()

    def _obey(self) -> bool:
        """Send the signals that the launcher asked for; False if the launcher is gone."""
        try:
            data = os.read(0, 4096)
        except OSError:  # the channel was reset
            return False
        self._last_heard = time.monotonic()
        *lines, self._input = (self._input + data).split(b"\n")
        for line in filter(None, lines):
            self._scan()
            self._send(int(line))
        return bool(data)

    def _is_forsaken(self) -> bool:
        """Tell the launcher that all is well here; True if it has not done so itself for too long."""
        now = time.monotonic()
        if self._silence_seconds and now - self._last_beat >= BEAT_SECONDS:
            self._last_beat = now
            report()
        return 0 < self._silence_seconds < now - self._last_heard

    def _send(self, number: int) -> None:
        """Send a signal to the process; SIGKILL to all its descendants too."""
        targets = descendants(os.getpid()) if number == signal.SIGKILL else [self._pid]
        if self._status is None or number == signal.SIGKILL:
            for pid in targets:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def _reap(self) -> None:
        """Take note of ended processes; report the status of the main one."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    self._status = os.waitstatus_to_exitcode(status)
                    report(status=self._status, time=time.time())

    def _scan(self) -> None:
        """Report shared memory that the process or a descendant has newly mapped."""
        seen = set().union(*(mapped_segments(pid) for pid in descendants(os.getpid())))
        new = seen - self._protected - self._segments.keys()
        if new:
            self._segments |= {name: segment_inode(name) for name in new}
            self._record.write(self._segments)
            report(segments=sorted(new))
        self._scan_seconds = (
            SCAN_SECONDS if new else min(SCAN_GROWTH * self._scan_seconds, SELDOM_SCAN_SECONDS)
        )
        self._next_scan = time.monotonic() + self._scan_seconds

    def _end_descendants(self, number: int) -> None:
        """Send a signal to all that is left; after the grace, SIGKILL."""
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
                number = 0  # the polite signal is sent once
            time.sleep(POLL_SECONDS)

    def _abandon(self) -> None:
        """The launcher is gone: end everything and clear the shared memory in its stead."""
        self._scan()
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while self._status is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._reap()
        self._send(signal.SIGKILL)
        self._end_descendants(signal.SIGKILL)
        # by now the names may be the next job's: another inode, or in some process's use
        used = set().union(*(mapped_segments(int(pid)) for pid in os.listdir("/proc") if pid.isdigit()))
        for name, inode in self._segments.items():
            if name not in used and segment_inode(name) == inode:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(SHARED_MEMORY_FOLDER, name))


def report(**message: object) -> None:
    """Tell the launcher; if it is gone nobody need know."""
    with contextlib.suppress(OSError):
        os.write(2, json.dumps(message).encode() + b"\n")


def read_request() -> dict | None:
    """Read the first line of stdin; None if the launcher went before it wrote one."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # one at a time: what follows is for the watch
        if not byte:
            return None
        line += byte
    return json.loads(line)


def main() -> int:
    """Keep one process as stdin asks; the status says nothing, the reports do."""
    request = read_request()
    if request is None:
        return 1
    keeper = Keeper(request["protected_segments"], request.get("silence_seconds", 0.0))
    try:
        keeper.start(request["command"], request["environment"], request["folder"])
        keeper.watch()
    except OSError as error:
        report(error=str(error))
        return 1
    finally:
        keeper.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
