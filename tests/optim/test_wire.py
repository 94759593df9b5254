"""What travels: layout of messages, memory shared between processes, one process alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.optim.network_exchange import WireFormat
from dglkge.optim.outboxes import NeighbourOutbox, Outbox, is_alive, usable
from tests import warm

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7), st.sampled_from(TYPES)), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([np.int32, np.int64]),
)
def test_sections_hold_what_is_written(tables, with_counts, id_type) -> None:
    """Sections do not overlap, are aligned, and read back."""
    numbers, dims, types = zip(*tables)
    wire = WireFormat(tuple(types), tuple(dims), np.dtype(id_type), with_counts)
    sections, num_bytes = wire.plan(numbers)
    message = np.zeros(num_bytes, np.uint8)
    for table, section in enumerate(sections):
        assert section.rows % 8 == section.ids % 8 == section.counts % 8 == 0
        wire.ids(message, section)[:] = 10 * table + np.arange(section.num_rows)
        if section.num_rows:
            wire.rows(message, table, section).fill_(table + 1)
        if with_counts:
            wire.counts(message, section)[:] = 5 + table
    for table, section in enumerate(sections):
        assert wire.ids(message, section).tolist() == [10 * table + i for i in range(numbers[table])]
        if section.num_rows:
            assert wire.rows(message, table, section).shape == (numbers[table], dims[table])
            assert (wire.rows(message, table, section) == table + 1).all()
        if with_counts:
            assert (wire.counts(message, section) == 5 + table).all()


@pytest.mark.skipif(not usable(), reason="no memory files, or a processor that reorders writes")
def files_in_memory() -> set[str]:
    """Return the files of /dev/shm that this process has mapped; other processes may make some meanwhile."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[-1] for line in maps if "/dev/shm/" in line}


def test_an_outbox_is_read_by_another_process() -> None:
    """Another process sees header and body, also after the body grew; nothing is left in the file system."""
    before = files_in_memory()
    outbox = Outbox(1000)
    outbox.fields[0], outbox.fields[999] = 41, 42
    outbox.reserve(10)
    outbox.body[:10] = 7
    script = (
        "import sys; from dglkge.optim.outboxes import *; "
        "box = NeighbourOutbox(3, Address(*map(int, sys.argv[1:]))); "
        "print(box.fields[0], box.fields[999], box.body[:10].sum(), len(box.body) >= 10, box.has_failed)"
    )
    command = [*warm.python(), "-c", script, *map(str, outbox.address)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.check_output(command, text=True, env=environment).split() == [
        "41",
        "42",
        "70",
        "True",
        "False",
    ]
    near = NeighbourOutbox(0, outbox.address)
    outbox.reserve(100_000)
    outbox.body[99_999] = 5
    outbox.fail()
    assert near.body[99_999] == 5
    assert near.has_failed
    assert files_in_memory() <= before
    with pytest.raises(OSError, match=f"process {os.getpid()} is not trainer 2"):
        NeighbourOutbox(2, outbox.address._replace(token=1))


def test_liveness() -> None:
    """A running process is alive; an ended one is not, reaped or not."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(child.pid)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(child.pid)
    child.wait()
    assert not is_alive(child.pid)
