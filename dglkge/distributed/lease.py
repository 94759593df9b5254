"""Lease on a run's folder: one job at a time writes there, on whichever hosts the folder is mounted.

The lease is a small file in the folder. It is created by a hard link, which is atomic on shared disks too,
and its holder renews it every RENEW_SECONDS. It has expired if its holder is dead (a process of this host,
identified by its pid and start time), or if it has not changed for EXPIRY_SECONDS while another host watched
it. Clocks of two hosts are never compared.

An expired lease is broken by one process only. That process first creates a file whose name contains the
checksum of the expired lease, and then reads the lease again. If it has changed, a faster process has taken
it. Every holder reads its lease again before it publishes anything (:meth:`Lease.check`): a job that was
suspended for longer than the expiry finds the lease of another job, and ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dglkge.checkpoint.layout import LEASE_FILE
from dglkge.distributed.jobs import process_start
from dglkge.errors import CheckpointError, NotReadyError, StorageError, write_errors

logger = logging.getLogger(__name__)

RENEW_SECONDS = 10.0
EXPIRY_SECONDS = 60.0
GRACE_SECONDS = 3.0
"""Time before a lease of a live process of this host is refused: its job may have been killed just now."""
POLL_SECONDS = 0.2
READ_ATTEMPTS = 10

TRAINER = "trainer"
LAUNCHER = "launcher"

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def new_nonce() -> str:
    """Return a unique id of 16 hexadecimal digits."""
    return uuid.uuid4().hex[:16]


def utc_now() -> str:
    """Return the time for messages, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


@dataclass(frozen=True)
class Holder:
    """Process that holds a lease: the content of the lease file.

    Attributes
    ----------
    nonce : str
        Of the job; its temporary files, receipts and manifests contain it too.
    job : str
        The launcher's id, equal for all attempts of one job; empty without a launcher.
    role : str
        ``"trainer"``, ``"launcher"`` or a command's name.
    host, boot_id, pid_namespace, pid, start_time
        Identify the process; the start time is in the kernel's ticks since the boot.
    since : str
        Time at which the lease was taken, for messages.
    renewed_ns : int
        Clock of the holder's host at the last renewal; only changes of it are used.
    """

    nonce: str
    job: str
    role: str
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_time: int
    since: str
    renewed_ns: int

    @classmethod
    def this_process(cls, nonce: str, job: str, role: str) -> Holder:
        """Describe this process."""
        process = os.getpid(), process_start(os.getpid())
        return cls(nonce, job, role, *_kernel(), *process, utc_now(), time.time_ns())

    @classmethod
    def from_bytes(cls, content: bytes) -> Holder | None:
        """Read a lease file; None if it is empty, half-written or has another content."""
        try:
            fields = json.loads(content)
            holder = cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls)})
        except (ValueError, KeyError, TypeError):
            return None
        return holder if isinstance(holder.pid, int) and isinstance(holder.nonce, str) else None

    def to_bytes(self) -> bytes:
        """Return the file's content; every renewal has the same length and overwrites it in place."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @property
    def is_on_this_host(self) -> bool:
        """Whether the pid is that of a process in this process's own pid namespace."""
        return (self.host, self.boot_id, self.pid_namespace) == _kernel()

    @property
    def is_dead(self) -> bool:
        """Whether a process of this host has ended."""
        return not 0 < process_start(self.pid) == self.start_time

    def describe(self) -> str:
        """Return the holder's description for messages."""
        return f"{self.role} (pid {self.pid}) on {self.host} since {self.since}"


class Lease:
    """Permission to write to a run's folder, held by this process or by another one of the same job.

    The nonce is the job's, for temporary names and receipts; the holder's is the same, unless it is the
    launcher. The holder renews the lease in a thread until :meth:`release`.
    """

    def __init__(self, path: Path, nonce: str, holder: Holder, is_holder: bool) -> None:
        self.path = path
        self.nonce = nonce
        self.is_holder = is_holder
        self._holder = holder
        self._pid = os.getpid()
        self._released = threading.Event()
        self._is_lost = False
        self._is_busy: Callable[[], bool] = lambda: False
        if is_holder:
            # A daemon thread: a process that exits without release leaves the file, and its pid shows that it
            # is dead.
            threading.Thread(target=self._renew, name="dglkge-lease", daemon=True).start()

    @classmethod
    def shared(cls, folder: Path, nonce: str, holder_nonce: str) -> Lease:
        """Build the lease that another process of the job holds."""
        holder = Holder.this_process(holder_nonce, "", TRAINER)
        return cls(folder / LEASE_FILE, nonce, holder, is_holder=False)

    @property
    def holder_nonce(self) -> str:
        """Nonce that the file must contain."""
        return self._holder.nonce

    def check(self, afresh: bool = True) -> None:
        """Read the lease file again, before something is published; raises CheckpointError if it is lost.

        If not ``afresh``, it is read only where the last renewal found it lost.
        """
        if not (afresh or self._is_lost):
            return
        holder = Holder.from_bytes(self._read() or b"")
        if holder is not None and holder.nonce == self.holder_nonce:
            return
        gone = "it is gone, or this host does not see that folder (machines that share no disk need --sync)"
        now = gone if holder is None else f"it is held by {holder.describe()}"
        raise CheckpointError(
            f"this job has lost its lease on {self.path.parent}: {now}; nothing more is written there "
            f"(a job that is suspended for more than {EXPIRY_SECONDS:g} s loses it)"
        )

    def keep_while(self, is_busy: Callable[[], bool]) -> None:
        """Set a test for a write that still runs: while it is true, :meth:`release` does nothing."""
        self._is_busy = is_busy

    def release(self) -> None:
        """Remove the lease file if this process holds it."""
        # A forked child inherits this object but not the thread: it must not remove its parent's lease.
        if self._released.is_set() or os.getpid() != self._pid or self._is_busy():
            return
        self._released.set()
        if self.is_holder:
            with contextlib.suppress(OSError):
                # Read again first: another job may have taken the lease after the expiry.
                holder = Holder.from_bytes(self.path.read_bytes())
                if holder is not None and holder.nonce == self.holder_nonce and holder.pid == self._pid:
                    self.path.unlink()

    def _read(self) -> bytes | None:
        """Read the file, with retries: the NFS cache of this host may be older than the file."""
        for attempt in range(READ_ATTEMPTS):
            with contextlib.suppress(OSError):
                return self.path.read_bytes()
            if attempt + 1 < READ_ATTEMPTS:
                time.sleep(POLL_SECONDS)
                with contextlib.suppress(OSError):
                    os.listdir(self.path.parent)  # makes the NFS client revalidate its cache
        return None

    def _renew(self) -> None:
        """Renew the lease every RENEW_SECONDS until it is released or lost; the body of the thread."""
        is_warned = False
        while not self._released.wait(RENEW_SECONDS):
            try:
                with open(self.path, "r+b", buffering=0) as file:
                    # From the file that is written below: if another job renames its lease into place now,
                    # the write goes to the old file and does no harm.
                    holder = Holder.from_bytes(file.read(65536))
                    if holder is None or holder.nonce != self.holder_nonce:
                        self._is_lost = True
                        return
                    renewed = dataclasses.replace(self._holder, renewed_ns=time.time_ns())
                    os.pwrite(file.fileno(), renewed.to_bytes(), 0)
                    os.fsync(file.fileno())
                is_warned = False
            except OSError as error:
                if not is_warned and not self._released.is_set():
                    logger.warning("the lease %s could not be renewed: %s", self.path, error)
                is_warned = True


class LeaseTaker:
    """Takes the lease of a folder, which is created, once no other job holds it.

    Parameters
    ----------
    folder : Path
    nonce : str
        Of the job; a lease with this nonce is shared, as another machine of the job mounts the same disk.
    job : str
        The launcher's id of the job: the launcher's own lease is shared, that of an earlier attempt replaced.
    role : str
        Of this process, for messages.
    """

    def __init__(self, folder: Path, nonce: str, job: str = "", role: str = TRAINER) -> None:
        self.folder = folder
        self.path = folder / LEASE_FILE
        self._mine = Holder.this_process(nonce, job, role)
        self._observed: dict[Path, tuple[bytes, float]] = {}
        self._first_seen: float | None = None
        self._has_warned = False

    def attempt(self, seconds: float) -> Lease | None:
        """Try to take the lease for some seconds; None if it is not known yet whether the holder is alive.

        Raises
        ------
        CheckpointError
            If a living job holds the lease, or the folder may not be written to.
        StorageError
            If the disk is full or fails.
        """
        deadline = time.monotonic() + seconds
        while True:
            with write_errors(f"cannot write to {self.folder}"):
                self.folder.mkdir(parents=True, exist_ok=True)
                lease = self._try()
            if lease is not None or time.monotonic() >= deadline:
                return lease
            time.sleep(POLL_SECONDS)

    def take(self) -> Lease:
        """Take the lease; blocks for up to EXPIRY_SECONDS if its holder is on another host and may be dead.

        Raises CheckpointError as :meth:`attempt`, and NotReadyError if the disk is full or fails.
        """
        try:
            while (lease := self.attempt(EXPIRY_SECONDS)) is None:
                pass
        except StorageError as error:
            raise NotReadyError(str(error)) from error
        return lease

    def _try(self) -> Lease | None:
        """Take the lease if it is free or has expired, or share that of this job; None if it is held."""
        holder = Holder.from_bytes(_content(self.path) or b"")
        if holder is not None and self._shares(holder):
            return Lease(self.path, self._mine.nonce, holder, is_holder=False)
        if self._acquire(self.path):
            return Lease(self.path, self._mine.nonce, self._mine, is_holder=True)
        return None

    def _shares(self, holder: Holder) -> bool:
        """Whether a lease belongs to this job: held by another machine of it, or by its launcher."""
        if holder.nonce == self._mine.nonce:
            return True
        # Trainers of a job with --sync share the launcher's lease if they see its folder.
        is_launcher = bool(self._mine.job) and holder.job == self._mine.job and holder.role == LAUNCHER
        return is_launcher and not (holder.is_on_this_host and holder.is_dead)

    def _acquire(self, path: Path) -> bool:
        """Create a lease file, or break and replace an expired one; False if it is held."""
        if self._create(path):
            return True
        content = _content(path)
        if content is None or not self._may_break(path, content):
            return False
        # The guard follows the same protocol: a process may have died while it broke the lease.
        guard = self.folder / f"{LEASE_FILE}.{zlib.crc32(content):08x}.broken"
        if not self._acquire(guard):  # another process breaks the same lease
            return False
        try:
            # The protocol's second read: the guard excludes others, and this shows whether one was faster.
            if _content(path) != content:
                return False
            os.replace(self._write_temporary(), path)
            return True
        finally:
            with contextlib.suppress(OSError):
                guard.unlink(missing_ok=True)

    def _create(self, path: Path) -> bool:
        """Create the file with its whole content in one atomic step; False if it exists."""
        temporary = self._write_temporary()
        try:
            os.link(temporary, path)
            return True
        except FileExistsError:
            # NFS: the link was made, its reply was lost, and the repeated call failed
            return os.stat(temporary).st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with open(descriptor, "wb") as file:
            file.write(self._mine.to_bytes())
        return True

    def _write_temporary(self) -> Path:
        """Write our content to a file with a unique name."""
        temporary = self.folder / f"{LEASE_FILE}.{uuid.uuid4().hex}.tmp"
        temporary.write_bytes(self._mine.to_bytes())
        return temporary

    def _may_break(self, path: Path, content: bytes) -> bool:
        """Whether the holder of a lease file is dead, as far as it is known yet; refuses if it is alive."""
        now = time.monotonic()
        holder = Holder.from_bytes(content)
        before, since = self._observed.get(path, (content, now))
        if before != content:
            since = now
        self._observed[path] = (content, since)
        # On this host the kernel's table decides at once; elsewhere only the passing of time can.
        if holder is not None and holder.is_on_this_host:
            if holder.is_dead:
                return True
            self._first_seen = self._first_seen or now
            if path == self.path and now - self._first_seen >= GRACE_SECONDS:
                self._refuse(holder)
            return False
        if holder is not None and self._mine.job and holder.job == self._mine.job:
            return True  # an earlier attempt of the same launcher, which has ended it
        if path == self.path and holder is not None and before != content:
            self._refuse(holder)  # it was renewed, or another waiting job was faster
        if path == self.path and not self._has_warned:
            self._has_warned = True
            who = "an unreadable lease" if holder is None else holder.describe()
            logger.warning(
                "%s is held by %s; waiting up to %g s for it to be renewed, then it counts as dead",
                self.folder, who, EXPIRY_SECONDS,
            )  # fmt: skip
        # Measured by this host's monotonic clock from its own first look: six renewals have been missed by
        # then.
        return now - since >= EXPIRY_SECONDS

    def _refuse(self, holder: Holder) -> None:
        """Raise the error that names the job that writes here."""
        raise CheckpointError(
            f"{self.folder} is in use: another job writes there, {holder.describe()}; wait for it, end it, "
            f"or take another output folder (if this folder is a copy of that job's, remove {self.path})"
        )


@contextlib.contextmanager
def hold(folder: Path, role: str) -> Iterator[Lease]:
    """Hold the lease of a folder inside the block, for work of a single process; raises CheckpointError."""
    lease = LeaseTaker(folder, new_nonce(), role=role).take()
    try:
        yield lease
    finally:
        lease.release()


def _content(path: Path) -> bytes | None:
    """Read a small file; None if absent."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def boot_id() -> str:
    """Return the kernel's id of this boot; empty if unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _kernel() -> tuple[str, str, str]:
    """Return host, boot id and id of the pid namespace, empty if unknown: the kernel's table of pids.

    In one table, pid and start time identify a process.
    """
    with contextlib.suppress(OSError):
        return socket.gethostname(), boot_id(), os.readlink("/proc/self/ns/pid")
    return socket.gethostname(), boot_id(), ""
