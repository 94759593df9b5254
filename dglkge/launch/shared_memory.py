"""POSIX shared-memory segments: names, users, free space, and removal of those that jobs have left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator

from dglkge.distributed.jobs import (
    claims_of_others,
    is_locked,
    job_of_segment,
    job_prefix,
    live_jobs,
    remove_stale_entries,
)
from dglkge.errors import NotReadyError
from dglkge.launch.watchdog import RECORD_PREFIX, SHARED_MEMORY_FOLDER


def segment_names(folder: str = SHARED_MEMORY_FOLDER) -> set[str]:
    """Return the names of all segments."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}


def remove_segments(names: Iterable[str], folder: str = SHARED_MEMORY_FOLDER) -> list[str]:
    """Remove segments; ignores absent ones and those of other users.

    Returns
    -------
    list of str
        The names that were removed, sorted.
    """
    removed = []
    for name in sorted(names):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
            removed.append(name)
    return removed


def remove_job_segments(job: str, folder: str = SHARED_MEMORY_FOLDER) -> list[str]:
    """Remove the segments whose names begin with the id of a job; return the names that were removed."""
    names = segment_names(folder)
    return remove_segments({name for name in names if job and name.startswith(job_prefix(job))}, folder)


def check_shared_memory(needed_bytes: int, job: str = "", folder: str = SHARED_MEMORY_FOLDER) -> None:
    """Raise NotReadyError if the tables do not fit into free shared memory; the message has both figures.

    Without this check a process would die of SIGBUS when it writes to a page that cannot be allocated.

    Parameters
    ----------
    needed_bytes : int
    job : str
        Id of the job; what other jobs have planned and not yet allocated is not free for it.
    folder : str
        Folder of POSIX shared memory.
    """
    free_bytes = shutil.disk_usage(folder).free
    claims = claims_of_others(job, folder)
    if needed_bytes > free_bytes - claims.shared_memory_bytes:
        others = ""
        if claims.shared_memory_bytes:
            others = (
                f", of which other jobs will take {claims.shared_memory_bytes / 1e9:.2f} GB (dglkge jobs)"
            )
        raise NotReadyError(
            f"the tables need {needed_bytes / 1e9:.2f} GB of shared memory, "
            f"{folder} has {free_bytes / 1e9:.2f} GB free{others}"
        )


WATCHDOG_EXIT_SECONDS = 15.0
"""A watchdog without a launcher gives its process 3 s after SIGTERM and 5 s after SIGKILL."""

POLL_SECONDS = 0.1


def wait_for_watchdogs(
    job: str = "", folder: str = SHARED_MEMORY_FOLDER, seconds: float = WATCHDOG_EXIT_SECONDS
) -> None:
    """Wait until the watchdogs of ended jobs, and of this job's earlier attempts, have ended.

    They still end processes, which hold ports, memory and files of the run.

    Parameters
    ----------
    job : str
        Id of the job that is about to start processes.
    folder : str
        Folder of POSIX shared memory.
    seconds : float
        Limit of the wait.

    Raises
    ------
    NotReadyError
        If one still runs after the timeout.
    """
    deadline = time.monotonic() + seconds
    while names := _live_records_of_ended_jobs(job, folder):
        if time.monotonic() > deadline:
            pids = ", ".join(name[len(RECORD_PREFIX) :].partition("-")[0] for name in names)
            raise NotReadyError(
                f"processes of an earlier job have not ended on this machine after {seconds:g} s "
                f"(their watchdogs: pid {pids}); end them"
            )
        time.sleep(POLL_SECONDS)


def _live_records_of_ended_jobs(job: str, folder: str) -> list[str]:
    """Return the records of watchdogs that run although their job has ended, or is this one."""
    running = {entry.job for entry in live_jobs(folder)} - {job}
    return [name for name, is_alive in _records(folder) if is_alive and _job_of(folder, name) not in running]


def stale_segments(folder: str = SHARED_MEMORY_FOLDER) -> set[str]:
    """Return the shared memory that :func:`remove_stale_segments` would remove."""
    # Names first: a job is registered before it makes any, so those of a job that registers meanwhile are not
    # in the list.
    names = segment_names(folder)
    records = list(_records(folder))
    running = {entry.job for entry in live_jobs(folder)}
    running |= {_job_of(folder, name) for name, is_alive in records if is_alive}
    return {
        name
        for name in names
        if job_of_segment(name) and job_of_segment(name) not in running and _is_own(folder, name)
    }


def remove_stale_segments(folder: str = SHARED_MEMORY_FOLDER) -> list[str]:
    """Remove shared memory of jobs that have ended without removing it, and their entries and records.

    Removed are all segments with the id of a job that has neither launcher nor watchdog any more.

    Returns
    -------
    list of str
        Names of the segments, sorted.
    """
    removed = remove_segments(stale_segments(folder), folder)
    for record in [name for name, is_alive in _records(folder) if not is_alive]:
        with contextlib.suppress(OSError):  # another user's
            os.unlink(os.path.join(folder, record))
    remove_stale_entries(folder)
    return removed


def _job_of(folder: str, record: str) -> str:
    """Return the id of the job of a watchdog's record; empty if unknown."""
    try:
        with open(os.path.join(folder, record), encoding="utf-8") as file:
            return str(json.load(file).get("job", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _records(folder: str) -> Iterator[tuple[str, bool]]:
    """Yield the records of watchdogs, each with whether its watchdog is alive."""
    for name in sorted(segment_names(folder)):
        if not name.startswith(RECORD_PREFIX):
            continue
        try:
            with open(os.path.join(folder, name), "rb") as file:
                is_alive = is_locked(file.fileno())
        except OSError:  # removed meanwhile
            continue
        yield name, is_alive


def _is_own(folder: str, name: str) -> bool:
    """Whether a segment belongs to this user."""
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(folder, name)).st_uid == os.getuid()
    return False
