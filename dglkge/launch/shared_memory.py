"""POSIX shared-memory segments: names, users, free space, and removal of those that jobs have left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator

from dglkge.errors import NotReadyError
from dglkge.launch.watchdog import RECORD_PREFIX, SHARED_MEMORY_FOLDER, mapped_segments

__all__ = [
    "SHARED_MEMORY_FOLDER",
    "check_shared_memory",
    "dgl_segments",
    "remove_job_segments",
    "remove_segments",
    "segment_names",
    "segment_users",
]

KVSTORE_SUFFIX = "-kvdata-"
"""Suffix of the name of every tensor in DGL's kvstore (its ``kvstore.py``, all versions)."""

GRAPH_MARK = "_node_meta"
"""Suffix of the partition book of a graph (DGL's ``graph_partition_book.py``, all versions)."""


def segment_names(folder: str = SHARED_MEMORY_FOLDER) -> set[str]:
    """Return the names of all segments."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}


def dgl_segments(names: Collection[str]) -> set[str]:
    """Select the names that DGL gives: tensors of the kvstore, and parts of a shared graph.

    Graph G is shared as ``G``, ``G_node_...``, ``G_edge_...`` and, for each edge type, ``GG_0_csc_...``.
    """
    graphs = {name[: -len(GRAPH_MARK)] for name in names if name.endswith(GRAPH_MARK)}
    starts = tuple(
        start for graph in graphs for start in (f"{graph}_node_", f"{graph}_edge_", f"{graph}{graph}_")
    )
    return {
        name for name in names if name.endswith(KVSTORE_SUFFIX) or name in graphs or name.startswith(starts)
    }


def segment_users(names: Collection[str]) -> dict[str, int]:
    """Return the number of one process for each segment that a visible process has mapped."""
    users: dict[str, int] = {}
    if not names:
        return users
    for entry in os.listdir("/proc"):
        # /proc/<pid>/maps and not a count of users: POSIX shared memory has none.
        if entry.isdigit():
            for name in mapped_segments(int(entry)) & set(names):
                users.setdefault(name, int(entry))
    return users


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


def remove_job_segments(segments: Collection[str], before: Collection[str]) -> list[str]:
    """Remove segments that watchdogs have seen, and new segments of DGL that no process has mapped.

    The latter were created by a process that was killed before its watchdog scanned it.

    Parameters
    ----------
    segments : collection of str
        Those that the watchdogs have seen.
    before : collection of str
        Those that existed before the job; they are kept.
    """
    # Names that existed before are kept even if the job used them: they may be another job's.
    new = segment_names() - set(before)
    unseen = dgl_segments(new) - set(segments)
    return remove_segments((new & set(segments)) | (unseen - segment_users(unseen).keys()))


def check_shared_memory(needed_bytes: int, folder: str = SHARED_MEMORY_FOLDER) -> None:
    """Raise NotReadyError if the tables do not fit into free shared memory; the message has both figures.

    Without this check a process would die of SIGBUS when it writes to a page that cannot be allocated.
    """
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise NotReadyError(
            f"the tables need {needed_bytes / 1e9:.2f} GB of shared memory, "
            f"{folder} has {free_bytes / 1e9:.2f} GB free"
        )


WATCHDOG_EXIT_SECONDS = 15.0
"""A watchdog without a launcher gives its process 3 s after SIGTERM and 5 s after SIGKILL."""

POLL_SECONDS = 0.1


def wait_for_watchdogs(folder: str = SHARED_MEMORY_FOLDER, seconds: float = WATCHDOG_EXIT_SECONDS) -> None:
    """Wait until all watchdogs of earlier jobs have ended: they may still remove shared memory.

    Raises
    ------
    NotReadyError
        If one still runs after the timeout.
    """
    deadline = time.monotonic() + seconds
    while any(is_alive for _, is_alive in _records(folder)):
        if time.monotonic() > deadline:
            names = [name for name, is_alive in _records(folder) if is_alive]
            pids = ", ".join(name[len(RECORD_PREFIX) :].partition("-")[0] for name in names)
            raise NotReadyError(
                f"processes of an earlier job have not ended on this machine after {seconds:g} s "
                f"(their watchdogs: pid {pids}); end them"
            )
        time.sleep(POLL_SECONDS)


def stale_segments(folder: str = SHARED_MEMORY_FOLDER) -> set[str]:
    """Return the shared memory that :func:`remove_stale_segments` would remove."""
    records = [name for name, is_alive in _records(folder) if not is_alive]
    return set().union(*(_stale_segments_of(folder, record) for record in records))


def remove_stale_segments(folder: str = SHARED_MEMORY_FOLDER) -> list[str]:
    """Remove shared memory of jobs whose watchdogs were killed.

    DGL opens segments with O_CREAT and without O_EXCL, so a later job would silently use one of an equal
    name. Removed are those that no process has mapped: segments that a killed watchdog had seen, and segments
    of DGL that did not exist before its job, which may have been created between its last scan and its end.

    Returns
    -------
    list of str
        Names of the segments, sorted.
    """
    removed: list[str] = []
    for record in [name for name, is_alive in _records(folder) if not is_alive]:
        removed += remove_segments(_stale_segments_of(folder, record), folder)
        with contextlib.suppress(OSError):  # another user's
            os.unlink(os.path.join(folder, record))
    return sorted(removed)


def _stale_segments_of(folder: str, record: str) -> set[str]:
    """Return the unused segments of a job whose watchdog was killed, from its record."""
    try:
        with open(os.path.join(folder, record), encoding="utf-8") as file:
            content = json.load(file)
        protected, segments = set(content["protected"]), dict(content["segments"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()  # half-written, or there was no room: nothing is known of its job
    names = segment_names(folder)
    # A later segment of the same name has another inode and is not removed.
    seen = {name for name in names if segments.get(name) == _inode(folder, name)}
    unseen = dgl_segments(names) - protected
    left = {name for name in seen | unseen if _is_own(folder, name)}
    # Last, as it reads the maps of all processes.
    return left - segment_users(left).keys()


def _records(folder: str) -> Iterator[tuple[str, bool]]:
    """Yield the records of watchdogs, each with whether its watchdog is alive."""
    for name in sorted(segment_names(folder)):
        if not name.startswith(RECORD_PREFIX):
            continue
        try:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
        except OSError:  # removed meanwhile
            continue
        try:
            # A shared lock succeeds only if no watchdog holds its exclusive one, and two callers do not
            # collide.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield name, False
        except BlockingIOError:
            yield name, True
        finally:
            os.close(descriptor)


def _inode(folder: str, name: str) -> int:
    """Return the inode of a segment; -1 if absent."""
    try:
        return os.stat(os.path.join(folder, name)).st_ino
    except OSError:
        return -1


def _is_own(folder: str, name: str) -> bool:
    """Whether a segment belongs to this user."""
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(folder, name)).st_uid == os.getuid()
    return False
