"""What all tests share: the data beside the repository, and the look at what the tests leave behind."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SHARED_MEMORY = Path("/dev/shm")
MARK = "DGLKGE_TEST_SESSION"
"""Environment variable that marks what the tests started, whoever is its parent by now."""

LEAVE_SECONDS = 20
"""A DGL server leaves some seconds after its last client."""


@pytest.fixture(scope="session")
def shared_datasets() -> Path:
    """Folder of the public data sets, which lie beside the repository and are no part of it."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "datasets"
    if not folder.is_dir():
        pytest.skip(f"the data sets of ../shared are not here: no folder {folder}")
    return folder


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the living processes, this one apart, that carry the mark of this session."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.pid != os.getpid() and process.environ().get(MARK) == mark
            # Python's own helper of multiprocessing stays until this process ends.
            helper = ours and any("multiprocessing.resource_tracker" in word for word in process.cmdline())
            if ours and not helper and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return found


def unused_segments() -> set[str]:
    """Return the names in /dev/shm that no living process has mapped; the others are some live job's."""
    names = {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()
    for process in psutil.process_iter() if names else ():
        try:
            names -= {Path(region.path).name for region in process.memory_maps()}
        except (psutil.Error, OSError):
            continue
    return names


def end_processes(mark: str) -> list[str]:
    """Wait for the processes that the tests started, end those that stay, and describe these."""
    _, alive = psutil.wait_procs(marked_processes(mark), timeout=LEAVE_SECONDS)
    lines = []
    for process in alive:
        try:
            lines.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=LEAVE_SECONDS)
    return lines


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Hold that the tests leave no process and no shared memory; if not, the last test has an error."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    before = unused_segments()
    yield
    left = end_processes(mark) + [f"/dev/shm/{name}" for name in sorted(unused_segments() - before)]
    if left:
        pytest.fail("the tests left behind:\n  " + "\n  ".join(left), pytrace=False)
