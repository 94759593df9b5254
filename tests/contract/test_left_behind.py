"""The look at what tests leave behind (tests/conftest.py) sees processes and shared memory."""

from __future__ import annotations

import mmap
import os
import subprocess
import uuid

import psutil

from tests import conftest as guard


def test_orphans_are_found_and_ended(monkeypatch):
    monkeypatch.setattr(guard, "LEAVE_SECONDS", 0.1)
    mark, command = uuid.uuid4().hex, ["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"]
    pid = int(subprocess.run(command, env={**os.environ, guard.MARK: mark}, stdout=subprocess.PIPE).stdout)
    try:
        assert guard.end_processes(mark) == [f"process {pid}: sleep 600"]
    finally:
        subprocess.run(["kill", "-9", str(pid)], capture_output=True)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert guard.end_processes(mark) == []


def test_segments_are_found_once_no_process_maps_them():
    path = guard.SHARED_MEMORY / f"dglkge-test-{uuid.uuid4().hex}"
    path.write_bytes(b"x" * mmap.PAGESIZE)
    try:
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0):
            assert path.name not in guard.unused_segments()
        assert path.name in guard.unused_segments()
    finally:
        path.unlink()
