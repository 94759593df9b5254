"""Runs ``build_graph.py`` as a child whose output goes to a log file."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dglkge.data.dataset_files import PARTITIONS
from dglkge.data.json_file import load_json
from dglkge.errors import DglkgeError

_FILE = "job.json"

NO_ROOM_STATUS = 28
"""Exit status of the process where the disk is full; its log may have had no room for a message."""


@dataclass(frozen=True)
class GraphJob:
    """A graph to be partitioned; the triples lie in the folder's ``train.npy``.

    Attributes
    ----------
    graph_name : str
        Name of the graph in DGL.
    num_parts, method, seed
        How to partition it: ``"metis"`` or ``"random"``.
    entity_types : dict of str to int
        Number of entities of each type.
    edge_types : list of [lhs, rhs, first_triple_id, end_triple_id]
        The range of triples of each pair of types.
    num_relations : int
        Number of relations.
    has_weights : bool
        Whether ``train_weights.npy`` lies there.
    """

    graph_name: str
    num_parts: int
    method: str
    seed: int
    entity_types: dict[str, int]
    edge_types: list[list[Any]]
    num_relations: int
    has_weights: bool

    def save(self, dataset: Path) -> None:
        """Write the job into a dataset folder that is being built."""
        folder = dataset / PARTITIONS
        folder.mkdir()
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def take(cls, dataset: Path) -> GraphJob:
        """Read the job and remove its file."""
        path = dataset / PARTITIONS / _FILE
        job = cls(**load_json(path))
        path.unlink()
        return job


def end_with_parent(parent: int) -> None:
    """Ask Linux to end this process when its parent dies, even by ``kill -9``; end now if it has died."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <linux/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent has ended")


LOG = "partition.log"
_TAIL_LINES = 20
_FULL_BELOW = 2**20
"""Bytes. DGL's own errors do not say that the disk is full, and where it is full the log is cut off too."""
_ZEROED_MEMORY = ("MALLOC_PERTURB_=255", "GLIBC_TUNABLES=glibc.malloc.tcache_count=0")
"""METIS as DGL builds it reads memory that it never wrote, and cut FB15k-237 in another way at every run.
With this, glibc hands out zeroed memory, and equal input gives equal partitions (dgl 1.1.3 and 2.1.0). Its
caches of threads would not: what comes from there begins with an address."""


class PartitionError(DglkgeError):
    """Partitioning failed for a reason that is not in the input."""


def run_build(dataset: Path, job: GraphJob) -> None:
    """Partition the graph of a dataset folder that is being built.

    On any exception, an interrupt too, the child is ended before this returns.

    Raises
    ------
    PartitionError
        If the child fails; the message has the end of its log.
    OSError
        If the disk is full.
    """
    job.save(dataset)
    log_path = dataset / PARTITIONS / LOG
    command = [
        "env",
        *_ZEROED_MEMORY,
        sys.executable,
        str(Path(__file__).with_name("build_graph.py")),
        str(dataset),
        str(os.getpid()),
    ]
    with open(log_path, "wb") as log:
        # A session of its own, so that Ctrl-C comes to this process alone, which then ends the child.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if status == NO_ROOM_STATUS or (status and shutil.disk_usage(dataset).free < _FULL_BELOW):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if status:
        raise PartitionError(f"partitioning failed: {_reason(status)}\n{_tail(log_path)}")


def _reason(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name
    return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _tail(log_path: Path) -> str:
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:])
