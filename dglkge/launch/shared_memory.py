"""POSIX shared-memory segments: which there are, who uses them, and what killed jobs have left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator

from dglkge.errors import NotReadyError
from dglkge.launch.keeper import RECORD_PREFIX, SHARED_MEMORY_FOLDER, mapped_segments

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
"""End of the name of every tensor that DGL's kvstore shares (its ``kvstore.py``)."""

GRAPH_MARK = "_node_meta"
"""The partition book of graph G lies in the segment ``G_node_meta`` (its ``graph_partition_book.py``)."""


def segment_names(folder: str = SHARED_MEMORY_FOLDER) -> set[str]:
    """Return the names of all segments."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}


def dgl_segments(names: Collection[str]) -> set[str]:
    """Pick the names that DGL gives: tensors of the kvstore, and what belongs to a shared graph.

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
    """Return, for each segment that a visible process has mapped, the number of such a process."""
    users: dict[str, int] = {}
    if not names:
        return users
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            for name in mapped_segments(int(entry)) & set(names):
                users.setdefault(name, int(entry))
    return users


def remove_segments(names: Iterable[str], folder: str = SHARED_MEMORY_FOLDER) -> list[str]:
    """Remove segments; one that is gone already or belongs to another user stays as it is.

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
    """Remove what keepers saw in use, and DGL's segments that are new and in nobody's use.

    The latter were made by a process that was killed before its keeper looked.

    Parameters
    ----------
    segments : collection of str
        Those that the keepers saw.
    before : collection of str
        All that were there before the job; they stay.
    """
    new = segment_names() - set(before)
    unseen = dgl_segments(new) - set(segments)
    return remove_segments((new & set(segments)) | (unseen - segment_users(unseen).keys()))


def check_shared_memory(needed_bytes: int, folder: str = SHARED_MEMORY_FOLDER) -> None:
    """Compare what a machine's tables need with what is free: without room a process dies of SIGBUS.

    Raises
    ------
    NotReadyError
        If it is too little; the message has both figures.
    """
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise NotReadyError(
            f"the tables need {needed_bytes / 1e9:.2f} GB of shared memory, "
            f"{folder} has {free_bytes / 1e9:.2f} GB free"
        )


KEEPER_LEAVE_SECONDS = 15.0
"""A keeper whose launcher has gone gives its process 3 s, and 5 s more to die of SIGKILL."""

POLL_SECONDS = 0.1


def await_keepers(folder: str = SHARED_MEMORY_FOLDER, seconds: float = KEEPER_LEAVE_SECONDS) -> None:
    """Wait until no keeper of an earlier job is left: it may still remove shared memory.

    Raises
    ------
    NotReadyError
        If one is left after so many seconds.
    """
    deadline = time.monotonic() + seconds
    while any(is_alive for _, is_alive in _records(folder)):
        if time.monotonic() > deadline:
            names = [name for name, is_alive in _records(folder) if is_alive]
            pids = ", ".join(name[len(RECORD_PREFIX) :].partition("-")[0] for name in names)
            raise NotReadyError(
                f"processes of an earlier job have not ended on this machine after {seconds:g} s "
                f"(their keepers: pid {pids}); end them"
            )
        time.sleep(POLL_SECONDS)


def leftovers(folder: str = SHARED_MEMORY_FOLDER) -> set[str]:
    """Return the shared memory that :func:`remove_leftovers` would remove."""
    records = [name for name, is_alive in _records(folder) if not is_alive]
    return set().union(*(_left_by(folder, record) for record in records))


def remove_leftovers(folder: str = SHARED_MEMORY_FOLDER) -> list[str]:
    """Remove the shared memory of jobs whose keepers were killed: DGL would take over its names.

    That is, as far as no process uses it: the segments that a keeper had seen, and DGL's segments that were
    not there before its job, which may have been made between its last look and its end.

    Returns
    -------
    list of str
        Names of the segments, sorted.
    """
    removed: list[str] = []
    for record in [name for name, is_alive in _records(folder) if not is_alive]:
        removed += remove_segments(_left_by(folder, record), folder)
        with contextlib.suppress(OSError):  # another user's
            os.unlink(os.path.join(folder, record))
    return sorted(removed)


def _left_by(folder: str, record: str) -> set[str]:
    """Return the segments that a killed keeper's job has left and no process uses."""
    try:
        with open(os.path.join(folder, record), encoding="utf-8") as file:
            content = json.load(file)
        protected, segments = set(content["protected"]), dict(content["segments"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()  # it was killed while it wrote, or there was no room: nothing is known of its job
    names = segment_names(folder)
    seen = {name for name in names if segments.get(name) == _inode(folder, name)}
    unseen = dgl_segments(names) - protected
    left = {name for name in seen | unseen if _is_own(folder, name)}
    return left - segment_users(left).keys()


def _records(folder: str) -> Iterator[tuple[str, bool]]:
    """Yield the records of keepers, and whether each keeper is alive."""
    for name in sorted(segment_names(folder)):
        if not name.startswith(RECORD_PREFIX):
            continue
        try:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
        except OSError:  # gone meanwhile
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield name, False
        except BlockingIOError:
            yield name, True
        finally:
            os.close(descriptor)


def _inode(folder: str, name: str) -> int:
    """Return the inode of a segment; -1 if there is none."""
    try:
        return os.stat(os.path.join(folder, name)).st_ino
    except OSError:
        return -1


def _is_own(folder: str, name: str) -> bool:
    """Whether a segment belongs to this user."""
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(folder, name)).st_uid == os.getuid()
    return False
