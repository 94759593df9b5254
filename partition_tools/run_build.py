"""Runs ``build_graph.py`` as a child whose output goes to a log file."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from dglkge.data.dataset_files import PARTITIONS
from dglkge.errors import DglkgeError
from partition_tools.graph_job import NO_ROOM_STATUS, GraphJob

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
