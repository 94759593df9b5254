"""Register of the jobs of this machine: a locked file for each, in shared memory; and their processes.

``dglkge-job-<id>.json`` says who runs what in which folder, and what the job will take of memory. Its node
program on the machine holds a lock on the file as long as it lives, so a file without a lock belongs to a job
that has ended or was killed. The folder has the scope that
is wanted: containers that share it share its room too.

All names in shared memory that a job makes begin with :func:`job_prefix`, so what an ended job has left is
found by its id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dglkge.errors import InputError, NotReadyError, os_errors
from dglkge.file_lock import wait_for_lock

logger = logging.getLogger(__name__)

SHARED_MEMORY_FOLDER = "/dev/shm"
ENTRY_PREFIX, ENTRY_SUFFIX = "dglkge-job-", ".json"

REGISTER_LOCK_SECONDS = 20.0
"""Limit of the wait for the register, which others hold for milliseconds."""

_JOB_NAME = re.compile(r"dglkge-([0-9a-f]{16})-")
_BLOCK_BYTES = 512
"""Unit of ``st_blocks`` (man 3 stat)."""


def job_prefix(job: str) -> str:
    """Return what the names of all shared memory of a job begin with."""
    return f"dglkge-{job}-"


def job_of_segment(name: str) -> str:
    """Return the id of the job that a name in shared memory belongs to; empty for other names."""
    match = _JOB_NAME.match(name)
    return match.group(1) if match else ""


@dataclass(frozen=True)
class JobEntry:
    """What the register knows of a job on this machine.

    Attributes
    ----------
    user, host : str
        Name of the user who started it, and of the machine of the launcher.
    launcher_pid, launcher_started : int
        Number of the launcher there, and its start in clock ticks since the boot, which tells it from a later
        one of the same number.
    pid : int
        Number of the node program, the process of this machine that holds the entry.
    is_ending : bool
        Whether the launcher is lost and the node program ends the job's processes.
    command, folder, log_dir
        Script or module with its arguments; working folder; folder of the logs.
    run : str
        Folder of the run; empty for scripts of other projects.
    started : float
        Seconds since the epoch.
    ports : tuple of int
        Ports of the job's servers and rendezvous on this machine, taken or about to be.
    shared_memory_bytes, memory_bytes : int
        Planned bytes on this machine, of memory shared memory included; 0 if unknown.
    owner : int
        User id of the entry's file: any user can write entries, whose other fields are claims.
    """

    job: str
    user: str = ""
    host: str = ""
    launcher_pid: int = 0
    launcher_started: int = 0
    pid: int = 0
    is_ending: bool = False
    command: tuple[str, ...] = ()
    folder: str = ""
    run: str = ""
    log_dir: str = ""
    started: float = 0.0
    ports: tuple[int, ...] = ()
    shared_memory_bytes: int = 0
    memory_bytes: int = 0
    owner: int = dataclasses.field(default=-1, compare=False)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> JobEntry:
        """Build an entry from JSON values; ignores fields of later versions."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = {key: value for key, value in content.items() if key in known}
        for name in ("command", "ports"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        return dataclasses.asdict(self)

    @property
    def is_launched_here(self) -> bool:
        """Whether the launcher is on this machine."""
        return self.host == socket.gethostname()

    def describe(self) -> str:
        """Return ``job 1234 of user x, launcher pid 12 on host`` for messages."""
        user = self.user or "unknown"
        return f"job {self.job} of user {user}, launcher pid {self.launcher_pid} on {self.host}"


class Registration:
    """This process's hold on the entry of a job.

    Raises NotReadyError if the register cannot be written, or another job of this machine has the same run
    folder.
    """

    def __init__(self, entry: JobEntry, folder: str = SHARED_MEMORY_FOLDER) -> None:
        self._folder = folder
        self.entry = dataclasses.replace(entry, pid=os.getpid())
        name = f"{ENTRY_PREFIX}{entry.job}{ENTRY_SUFFIX}"
        self._path = os.path.join(folder, name)
        unlocked = os.path.join(folder, f".{name}.{os.getpid()}")
        with register_lock(folder):
            for other in live_jobs(folder) if entry.run else ():
                # An entry of another user may be a lie; the lease in the run's folder keeps that job out.
                if other.owner == os.geteuid() and other.run == entry.run and other.job != entry.job:
                    raise NotReadyError(
                        f"{entry.run} is in use: another job writes there, {other.describe()}; wait for it, "
                        f"end it (dglkge job stop {other.job}), or give another output"
                    )
            try:
                # Python opens files with O_CLOEXEC: children do not inherit the lock.
                self._descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._write()
                # After the lock: an entry without one counts as that of an ended job.
                os.rename(unlocked, self._path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.unlink(unlocked)
                raise NotReadyError(f"cannot register the job in {folder}: {error.strerror}") from None

    def update(self, **changes: Any) -> None:
        """Change fields of the entry."""
        self.entry = dataclasses.replace(self.entry, **changes)
        with contextlib.suppress(OSError):  # no room: the entry stays as it was
            self._write()

    def release(self) -> None:
        """Remove the entry."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self) -> None:
        """Overwrite the file in place: a new one would have to be locked again."""
        text = json.dumps(self.entry.to_dict()).encode()
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))


@contextlib.contextmanager
def register_lock(folder: str = SHARED_MEMORY_FOLDER) -> Iterator[None]:
    """Hold the register, for moments in which one process looks and then writes.

    The lock is on the folder itself: no file is left. Any user can hold it for ever, so after
    REGISTER_LOCK_SECONDS the block runs without it, with a warning: two jobs that start within milliseconds
    may then plan for the same memory. Raises NotReadyError if the folder does not exist.
    """
    with os_errors(NotReadyError, f"cannot open {folder}, where DGL's tables lie"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not wait_for_lock(descriptor, REGISTER_LOCK_SECONDS):
            logger.warning("another process keeps %s locked: the job starts without the lock", folder)
        yield
    finally:
        os.close(descriptor)


def live_jobs(folder: str = SHARED_MEMORY_FOLDER) -> list[JobEntry]:
    """Return the jobs that run on this machine, the oldest first."""
    entries = [entry for entry, is_live in _entries(folder) if is_live]
    return sorted(entries, key=lambda entry: (entry.started, entry.job))


def remove_stale_entries(folder: str = SHARED_MEMORY_FOLDER) -> None:
    """Remove the entries of jobs that have ended without it; ignores those of other users."""
    for entry, is_live in _entries(folder):
        if not is_live:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, f"{ENTRY_PREFIX}{entry.job}{ENTRY_SUFFIX}"))


def _entries(folder: str) -> Iterator[tuple[JobEntry, bool]]:
    """Yield all entries, each with whether its job is live."""
    for path in sorted(Path(folder).glob(f"{ENTRY_PREFIX}*{ENTRY_SUFFIX}")):
        job = path.name[len(ENTRY_PREFIX) : -len(ENTRY_SUFFIX)]
        try:
            with path.open("rb") as file:
                is_live = is_locked(file.fileno())
                owner = os.fstat(file.fileno()).st_uid
                text = file.read()
        except OSError:  # removed meanwhile
            continue
        try:
            entry = JobEntry.from_dict(json.loads(text))
        except (ValueError, TypeError, AttributeError):
            entry = JobEntry(job)  # read while it was written
        yield dataclasses.replace(entry if entry.job == job else JobEntry(job), owner=owner), is_live


def is_locked(descriptor: int) -> bool:
    """Whether another process holds an exclusive lock on an open file."""
    try:
        # A shared lock: two that look at the same time do not meet. It ends when the file is closed.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def allocated_bytes(job: str, folder: str = SHARED_MEMORY_FOLDER) -> int:
    """Return the bytes of shared memory that a job has allocated."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as items:
        for item in items:
            if item.name.startswith(job_prefix(job)):
                with contextlib.suppress(OSError):
                    total += item.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
    return total


@dataclass(frozen=True)
class Claims:
    """Bytes that other jobs have planned and not yet allocated; shared memory is part of memory."""

    shared_memory_bytes: int = 0
    memory_bytes: int = 0
    num_jobs: int = 0


def claims_of_others(job: str = "", folder: str = SHARED_MEMORY_FOLDER) -> Claims:
    """Return what the live jobs of this machine but the asking one will still allocate."""
    shared = memory = num_jobs = 0
    for entry in live_jobs(folder):
        if entry.job == job:
            continue
        num_jobs += 1
        in_segments = allocated_bytes(entry.job, folder)
        shared += max(0, entry.shared_memory_bytes - in_segments)
        memory += max(0, entry.memory_bytes - in_segments - _resident_bytes(entry.pid))
    return Claims(shared, memory, num_jobs)


def _resident_bytes(root: int) -> int:
    """Return the resident bytes of a process and its descendants, without shared memory and mapped files."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(root)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                memory = member.memory_info()
                total += memory.rss - memory.shared
    return total


def process_owner(pid: int) -> int:
    """Return the effective user id of a process; -1 if it cannot be seen."""
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).uids().effective)
    return -1


def matching_jobs(text: str, jobs: Sequence[JobEntry]) -> list[JobEntry]:
    """Return the jobs that a user means: by run folder, by id or its beginning, or by pid of the launcher."""
    folder = os.path.realpath(text)
    by_run = [entry for entry in jobs if entry.run and os.path.realpath(entry.run) == folder]
    if by_run:
        return by_run
    by_pid = [entry for entry in jobs if text.isdigit() and entry.launcher_pid == int(text)]
    return by_pid or [entry for entry in jobs if text and entry.job.startswith(text)]


def human_bytes(num_bytes: float) -> str:
    """Return a size in binary units with one decimal.

    Examples
    --------
    >>> human_bytes(900), human_bytes(1536)
    ('900 B', '1.5 KiB')
    """
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def parse_bytes(text: str) -> int:
    """Return the bytes of a size above 0, in GNU's units: ``4G`` and ``4GiB`` are binary, ``4GB`` is decimal.

    InputError if it is none.

    Examples
    --------
    >>> parse_bytes("1.5K"), parse_bytes("1.5 KiB"), parse_bytes("1.5kB")
    (1536, 1536, 1500)
    """
    match = re.fullmatch(r"(\d*\.?\d+)\s*([KMGT]?)(B|iB|)", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise InputError(f"{text!r} is no size; allowed: a number above 0 with K, M, G or T, as 4G or 4GB")
    base = 1000 if match[3].upper() == "B" else 1024
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))


MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")


def is_on_disk(path: str | os.PathLike[str]) -> bool:
    """Return whether the file system of a file or a folder keeps data elsewhere than in memory."""
    # The last mount on a place hides those before it.
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    real = Path(os.path.realpath(path))
    types = (mounts[place] for place in (real, *real.parents) if place in mounts)
    return next(types, "") not in MEMORY_FILE_SYSTEMS


def memory_of(pid: int) -> tuple[int, int]:
    """Return the resident bytes of a process, and those of them that others may share; zeros if unknown.

    The shared part has mapped files and shared memory: the tables, for trainers and servers.
    """
    try:
        # One short read: smaps_rollup, which tells shares apart, walks the page tables of all tables.
        memory = psutil.Process(pid).memory_info()
        return memory.rss, memory.shared
    except psutil.Error:
        return 0, 0


def find_servers(job: str) -> dict[int, int]:
    """Return the processes of this machine that are servers of a job: number of the server to pid."""
    found: dict[int, list[tuple[float, int]]] = {}
    for pid in psutil.pids() if job else ():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            process = psutil.Process(pid)
            variables = process.environ()
            number = variables.get("DGL_SERVER_ID", "")
            is_server = variables.get("DGLKGE_JOB") == job and variables.get("DGL_ROLE") == "server"
            if is_server and number.isdigit():
                found.setdefault(int(number), []).append((process.create_time(), pid))
    # Processes that a server starts inherit its variables; it was there before them.
    return {number: min(processes)[1] for number, processes in found.items()}


def process_start(pid: int) -> int:
    """Return the start of a process in clock ticks since the boot; 0 if it has ended or cannot be seen."""
    try:
        # The name, in brackets, may contain spaces: fields are counted behind it.
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        # A zombie has ended, though its parent has not yet waited for it.
        return 0 if state in "ZX" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return 0
