"""Tables of a job on a machine, in shared memory or in files: room, names, and removal of what jobs leave."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dglkge.distributed import jobs
from dglkge.errors import NotReadyError, os_errors
from dglkge.file_lock import try_lock

LOCK_FILE = "lock"
YOUNG_SECONDS = 60.0
"""A folder that is still hidden is being made for so long at most."""


@dataclass(frozen=True)
class MachineNeeds:
    """Needs of a job on one machine, as far as they are known.

    Attributes
    ----------
    shared_memory_bytes, memory_bytes, structure_bytes : int
        In shared memory; of all processes, shared memory included, without mapped files, interpreters and
        libraries; the part of the shared memory that stays there where tables are files. 0: unknown.
    storage : str
        ``tables.storage`` of the configuration.
    table_folders : tuple of str
        Folders for tables in files: the first with enough room is taken.
    """

    shared_memory_bytes: int = 0
    memory_bytes: int = 0
    structure_bytes: int = 0
    storage: str = "memory"
    table_folders: tuple[str, ...] = ()


def segment_names(folder: str = jobs.SHARED_MEMORY_FOLDER) -> set[str]:
    """Return the names of all segments."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}


def remove_segments(job: str = "", folder: str = jobs.SHARED_MEMORY_FOLDER) -> list[str]:
    """Remove shared memory of ended jobs and of `job`, which has no processes; return the sorted names."""
    # Names first: a job is registered before it makes any, so those of a job that registers meanwhile are not
    # in the list.
    names = segment_names(folder)
    running = {entry.job for entry in jobs.live_jobs(folder)} - {job}
    removed = []
    for name in sorted(names):
        path = os.path.join(folder, name)
        if jobs.job_of_segment(name) and jobs.job_of_segment(name) not in running:
            with contextlib.suppress(OSError):
                if os.stat(path).st_uid == os.getuid():
                    os.unlink(path)
                    removed.append(name)
    jobs.remove_stale_entries(folder)
    return removed


def check_shared_memory(needed_bytes: int, job: str = "", folder: str = jobs.SHARED_MEMORY_FOLDER) -> None:
    """Raise NotReadyError if the tables do not fit into free shared memory; the message has both figures.

    Without this check a process would die of SIGBUS when it writes to a page that cannot be allocated. What
    other jobs have planned and not yet allocated is not free.
    """
    free_bytes = shutil.disk_usage(folder).free
    claims = jobs.claims_of_others(job, folder)
    if needed_bytes > free_bytes - claims.shared_memory_bytes:
        claimed = f"{claims.shared_memory_bytes / 1e9:.2f} GB (dglkge job list)"
        words = f", of which other jobs will take {claimed}" if claims.shared_memory_bytes else ""
        raise NotReadyError(
            f"the tables need {needed_bytes / 1e9:.2f} GB of shared memory, "
            f"{folder} has {free_bytes / 1e9:.2f} GB free{words}"
        )


class TableFolder:
    """A folder of one attempt of a job, ``dglkge-<job>-<host>-<n>`` below a base; this process locks it.

    Raises NotReadyError if it cannot be made.
    """

    def __init__(self, base: Path, job: str) -> None:
        remove_stale_folders(base)
        with os_errors(NotReadyError, f"cannot make a folder for tables in {base}"):
            base.mkdir(parents=True, exist_ok=True)
            hidden = Path(tempfile.mkdtemp(prefix=f".{jobs.job_prefix(job)}{_host_digits()}-", dir=base))
            self._lock = os.open(hidden / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try_lock(self._lock)
            # After the lock: a folder that nobody holds counts as that of an ended job.
            self.path = hidden.with_name(hidden.name[1:])
            hidden.rename(self.path)

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_stale_folders(base: Path) -> None:
    """Remove what killed jobs of this user on this machine have left: folders that no process holds.

    Those of other machines that share the disk stay: their locks may not be seen here.
    """
    for folder in base.glob(f"*-{_host_digits()}-*"):
        name = folder.name.removeprefix(".")
        if name.startswith(f"{jobs.job_prefix(jobs.job_of_segment(name))}{_host_digits()}-"):
            with contextlib.suppress(OSError):
                status = folder.lstat()
                is_young = folder.name.startswith(".") and time.time() - status.st_mtime < YOUNG_SECONDS
                is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
                if is_ours and not is_young and not _is_held(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_held(folder: Path) -> bool:
    """Whether a process holds the lock of a folder; one without a lock file was left while it was removed."""
    with contextlib.suppress(FileNotFoundError), open(folder / LOCK_FILE, "rb") as file:
        return jobs.is_locked(file.fileno())
    return False


def _host_digits() -> str:
    """Return digits that stand for this machine in names."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def free_bytes(folder: Path) -> int:
    """Return the free room of the file system that a folder is or will be on; 0 if it may not be written."""
    path = Path(os.path.abspath(folder))
    path = next(place for place in (path, *path.parents) if place.exists())
    is_writable = path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    return shutil.disk_usage(path).free if is_writable else 0


def roomy_folder(candidates: Sequence[Path], needed_bytes: int, reason: str = "") -> Path:
    """Return the first folder with enough room for tables; raises NotReadyError if there is none."""
    for folder in candidates:
        if free_bytes(folder) > needed_bytes:
            return folder
    raise NotReadyError(
        f"{reason}files take {needed_bytes / 1e9:.2f} GB, and none of {', '.join(map(str, candidates))} has "
        "that room: give another tables.folder"
    )


def usual_folders(on_disk: bool = False) -> list[Path]:
    """Return the folders for temporary files, in which tables are put without the user's choice.

    With `on_disk` those are left out that are in memory.
    """
    folders = dict.fromkeys([Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")])
    return [folder for folder in folders if not on_disk or jobs.is_on_disk(folder)]
