"""Folders of tables that are files: chosen where there is room, held by a lock, removed with their job."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from dglkge.distributed.jobs import is_locked, job_of_segment, job_prefix
from dglkge.errors import NotReadyError
from dglkge.file_lock import try_lock

LOCK_FILE = "lock"
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
YOUNG_SECONDS = 60.0
"""A folder that is still hidden is being made for so long at most."""


class TableFolder:
    """A folder of one attempt of a job, ``dglkge-<job>-<host>-<n>`` below a base; this process locks it.

    Parameters
    ----------
    base : Path
        Made if it does not exist.
    job : str
        Id of the job.

    Raises
    ------
    NotReadyError
        If it cannot be made.

    Attributes
    ----------
    path : Path
    """

    def __init__(self, base: Path, job: str) -> None:
        remove_stale_folders(base)
        try:
            base.mkdir(parents=True, exist_ok=True)
            hidden = Path(tempfile.mkdtemp(prefix=f".{job_prefix(job)}{_host_digits()}-", dir=base))
            self._lock = os.open(hidden / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try_lock(self._lock)
            # After the lock: a folder that nobody holds counts as that of an ended job.
            self.path = hidden.with_name(hidden.name[1:])
            hidden.rename(self.path)
        except OSError as error:
            raise NotReadyError(f"cannot make a folder for tables in {base}: {error.strerror}") from None

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_stale_folders(base: Path) -> None:
    """Remove what killed jobs of this user on this machine have left: folders that no process holds.

    Those of other machines that share the disk stay: their locks may not be seen here.
    """
    with contextlib.suppress(OSError):
        for folder in list(base.iterdir()):
            job = job_of_segment(folder.name.removeprefix("."))
            if job and folder.name.removeprefix(".").startswith(f"{job_prefix(job)}{_host_digits()}-"):
                with contextlib.suppress(OSError):
                    status = folder.lstat()
                    is_young = folder.name.startswith(".") and time.time() - status.st_mtime < YOUNG_SECONDS
                    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
                    if is_ours and not is_young and not _is_held(folder):
                        shutil.rmtree(folder, ignore_errors=True)


def _is_held(folder: Path) -> bool:
    """Whether a process holds the lock of a folder; one without a lock file was left while it was removed."""
    with contextlib.suppress(FileNotFoundError), open(folder / LOCK_FILE, "rb") as file:
        return is_locked(file.fileno())
    return False


def _host_digits() -> str:
    """Return digits that stand for this machine in names."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def free_bytes(folder: Path) -> int:
    """Return the free room of the file system that a folder is or will be on; 0 if it may not be written."""
    folder = Path(os.path.abspath(folder))
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return 0
    return shutil.disk_usage(folder).free


def roomy_folder(candidates: Iterable[Path], needed_bytes: int) -> Path | None:
    """Return the first folder with enough room; None if there is none."""
    return next((folder for folder in candidates if free_bytes(folder) > needed_bytes), None)


def usual_folders(on_disk: bool = False) -> list[Path]:
    """Return the folders for temporary files, in which tables are put without the user's choice.

    Parameters
    ----------
    on_disk : bool
        Leave out those that are in memory.
    """
    folders = dict.fromkeys([Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")])
    return [folder for folder in folders if not (on_disk and file_system(folder) in MEMORY_FILE_SYSTEMS)]


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder, as the kernel's list of mounts names it."""
    real = os.path.realpath(folder)
    best, kind = "", ""
    with (
        contextlib.suppress(OSError),
        open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts,
    ):
        for line in mounts:
            _, place, found = line.split()[:3]
            place = place.replace("\\040", " ")
            # The last mount on a place hides those before it.
            if os.path.commonpath([place, real]) == place and len(place) >= len(best):
                best, kind = place, found
    return kind
