"""The look at what tests leave behind (tests/conftest.py) sees processes and shared memory."""

from __future__ import annotations

import importlib.util
import mmap
import os
import subprocess
import uuid

import psutil
import pytest

from tests.contract.source_tree import ROOT


@pytest.fixture
def guard(monkeypatch):
    """tests/conftest.py as a module of its own, with no patience."""
    spec = importlib.util.spec_from_file_location("guard_under_test", ROOT / "tests" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.1)
    return module


def test_orphans_are_found_and_ended(guard):
    mark = uuid.uuid4().hex
    orphan = subprocess.run(
        ["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"],
        env={**os.environ, guard.MARK: mark},
        capture_output=True,
        text=True,
        timeout=60,
    )
    pid = int(orphan.stdout)
    try:
        assert guard.end_processes(mark) == [f"process {pid}: sleep 600"]
    finally:
        subprocess.run(["kill", "-9", str(pid)], capture_output=True)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert guard.end_processes(mark) == []


def test_segments_are_found_once_no_process_maps_them(guard):
    path = guard.SHARED_MEMORY / f"dglkge-test-{uuid.uuid4().hex}"
    path.write_bytes(b"x" * mmap.PAGESIZE)
    try:
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0):
            assert path.name not in guard.unused_segments()
        assert path.name in guard.unused_segments()
    finally:
        path.unlink()
