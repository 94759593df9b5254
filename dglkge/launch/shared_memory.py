"""POSIX shared-memory segments: names, users, free space, and removal of those that jobs have left."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable

from dglkge.distributed.jobs import (
    SHARED_MEMORY_FOLDER,
    claims_of_others,
    job_of_segment,
    job_prefix,
    live_jobs,
    remove_stale_entries,
)
from dglkge.errors import NotReadyError


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


def stale_segments(folder: str = SHARED_MEMORY_FOLDER) -> set[str]:
    """Return the shared memory that :func:`remove_stale_segments` would remove."""
    # Names first: a job is registered before it makes any, so those of a job that registers meanwhile are not
    # in the list.
    names = segment_names(folder)
    running = {entry.job for entry in live_jobs(folder)}
    return {
        name
        for name in names
        if job_of_segment(name) and job_of_segment(name) not in running and _is_own(folder, name)
    }


def remove_stale_segments(folder: str = SHARED_MEMORY_FOLDER) -> list[str]:
    """Remove shared memory of jobs that have ended without removing it, and their entries.

    Returns
    -------
    list of str
        Names of the segments, sorted.
    """
    removed = remove_segments(stale_segments(folder), folder)
    remove_stale_entries(folder)
    return removed


def _is_own(folder: str, name: str) -> bool:
    """Whether a segment belongs to this user."""
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(folder, name)).st_uid == os.getuid()
    return False
