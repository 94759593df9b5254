"""Runs ``build_graph.py`` as a child process whose output goes to a log file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dglkge.data.dataset_files import PARTITION_LOG, PARTITIONS
from dglkge.errors import JobError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk and of an exhausted quota."""

NO_ROOM_STATUS = 28
"""Exit status of the child where the disk is full; its log may have had no room for a message."""


@dataclass(frozen=True)
class GraphJob:
    """Order to partition the graph of a data set folder; the fields are those of its description.

    ``entity_types`` has the number of entities of each type, ``edge_types`` the range of triples of each
    pair of types (lhs, rhs, first, end). With ``has_parts`` the partition of each node is given, in
    :data:`dglkge.data.dataset_files.GIVEN_PARTS`.
    """

    graph_name: str
    num_parts: int
    part_method: str
    seed: int
    entity_types: dict[str, int]
    edge_types: list[list[Any]]
    num_relations: int
    has_weights: bool
    has_parts: bool = False
    num_workers: int = 1
    num_times: int = 1

    @classmethod
    def of(cls, description: Mapping[str, Any], num_workers: int = 1, has_parts: bool = False) -> GraphJob:
        """Return the job for a data set with the fields of a description."""
        values = {field.name: description[field.name] for field in fields(cls) if field.name in description}
        return cls(**values, num_workers=num_workers, has_parts=has_parts)


SIGNAL_POLL_SECONDS = 0.5
"""Time after which a Ctrl-C is noticed that another thread received."""

_TAIL_LINES = 20
_FULL_BELOW = 2**20
"""Free bytes below which a failure counts as a full disk: DGL's errors do not name it, its log is cut off."""
_ZEROED_MEMORY = ("MALLOC_PERTURB_=255", "GLIBC_TUNABLES=glibc.malloc.tcache_count=0")
"""Environment that makes METIS deterministic. METIS as DGL builds it (2.1.0) reads memory that it
never wrote, so partitions of FB15k-237 differed between runs. MALLOC_PERTURB_=255 makes glibc return zeroed
memory. The per-thread cache is off, because glibc writes an address into the blocks that it keeps there."""


def run_build(dataset: Path, job: GraphJob) -> None:
    """Partition the graph of a data set folder that is being built.

    On any exception, KeyboardInterrupt included, the child is killed before this returns.

    Raises
    ------
    JobError
        If the child fails; the message has the end of its log.
    OSError
        If the disk is full.
    """
    (dataset / PARTITIONS).mkdir()
    log_path = dataset / PARTITIONS / PARTITION_LOG
    # By env: glibc reads these variables when a process starts, so setting them in the child is too late.
    script = str(Path(__file__).with_name("build_graph.py"))
    command = ["env", *_ZEROED_MEMORY, sys.executable, script, str(dataset), str(os.getpid())]
    with (
        open(log_path, "wb") as log,
        tempfile.TemporaryFile("w+", dir=dataset) as order,
        contextlib.ExitStack() as stack,
    ):
        # A file and no argument, which may have 128 KiB: there may be many types.
        json.dump(asdict(job), order)
        order.seek(0)
        # In a session of its own: Ctrl-C signals this process only, which then kills the child.
        with _interrupts_held():
            streams: dict[str, Any] = {"stdin": order, "stdout": log, "stderr": subprocess.STDOUT}
            child = subprocess.Popen(command, start_new_session=True, **streams)
            stack.callback(child.wait)
            stack.callback(child.kill)  # of one that has ended nothing
        status = None
        while status is None:
            # A timeout: the kernel may give SIGINT to another thread (of numpy, for instance), which does not
            # wake this one, and only this one runs Python's handler.
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(SIGNAL_POLL_SECONDS)
    # DGL writes its files in C++, where a full disk appears as another error.
    if status == NO_ROOM_STATUS or (status and shutil.disk_usage(dataset).free < _FULL_BELOW):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if status:
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:])
        reason = f"exit status {status}" if status > 0 else f"ended by {signal.Signals(-status).name}"
        reason += " (out of memory?)" if status == -signal.SIGKILL else ""
        raise JobError(f"partitioning failed: {reason}\n{tail}")


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C to the end of a block: an exception between fork and assignment would lose the child.

    A signal mask would not do: it holds for one thread, and the kernel gives the signal to another.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    noted: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if noted:
        handler(signal.SIGINT, None)
