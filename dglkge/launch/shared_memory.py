"""POSIX shared-memory segments: which there are, which look like DGL's, who uses them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterable

from dglkge.errors import NotReadyError
from dglkge.launch.keeper import SHARED_MEMORY_FOLDER, mapped_segments

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
