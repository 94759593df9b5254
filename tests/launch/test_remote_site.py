"""The machines of a job as the launcher sees them, with this machine for all of them."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dglkge.distributed.ip_config import Machine
from dglkge.distributed.jobs import JobEntry, live_jobs
from dglkge.distributed.lease import new_nonce
from dglkge.launch.process_plan import JobSettings
from dglkge.launch.remote.remote_site import PreflightError, RemoteSite
from dglkge.launch.remote.session import SshSettings
from dglkge.launch.watchdog import RECORD_PREFIX
from tests.launch.conftest import ROOT, TIMEOUT_SECONDS

ADDRESS = "127.0.0.1"
ENTRY = JobEntry(new_nonce())
SEGMENTS = Path("/dev/shm")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteSite]:
    """This machine alone, under an agent."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    opened = RemoteSite(SshSettings(), sys.executable, str(tmp_path))
    yield opened
    opened.close()


@pytest.fixture
def segment() -> Iterator[Path]:
    """A segment of shared memory, named as DGL names them."""
    path = SEGMENTS / f"{uuid.uuid4().hex}-kvdata-"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def record(segment: Path) -> Iterator[Path]:
    """A watchdog's record of that segment."""
    path = SEGMENTS / f"{RECORD_PREFIX}1-{uuid.uuid4().hex}"
    path.write_text(json.dumps({"job": "", "segments": {segment.name: segment.stat().st_ino}}))
    yield path
    path.unlink(missing_ok=True)


def test_segments_that_a_keeper_still_removes_are_not_protected(
    cluster: RemoteSite, segment: Path, record: Path
) -> None:
    """Another job's are left alone; a name that this job makes again is its own, and removed at its end."""

    def leave(descriptor: int) -> None:
        """Do as a watchdog does whose launcher has gone."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not live_jobs() and time.monotonic() < deadline:
            time.sleep(0.01)
        segment.unlink()
        record.unlink()
        os.close(descriptor)

    descriptor = os.open(record, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    watchdog = threading.Thread(target=leave, args=(descriptor,))
    watchdog.start()
    hosts = cluster.connect([Machine(ADDRESS, 1)], ENTRY)
    watchdog.join()
    assert [host.address for host in hosts] == [ADDRESS]
    segment.touch()
    assert cluster.executor().clean_up({ADDRESS: {segment.name}}) == [segment.name]
    assert not segment.exists()


def test_each_attempt_clears_what_the_one_before_has_left(
    cluster: RemoteSite, segment: Path, record: Path
) -> None:
    """The job is registered from the first attempt on; a watchdog may be killed in any of them."""
    left = record.rename(SEGMENTS / f"later-{uuid.uuid4().hex}")
    try:
        cluster.connect([Machine(ADDRESS, 1)], ENTRY)
        assert segment.exists()
        left.rename(record)
        cluster.connect([Machine(ADDRESS, 1)], ENTRY)
        assert not segment.exists() and not record.exists()
    finally:
        left.unlink(missing_ok=True)


def test_an_argument_of_a_task_may_have_the_name_of_the_timeout(cluster: RemoteSite, tmp_path: Path) -> None:
    """The agent's task ``hold_version`` has an argument ``seconds`` of its own."""
    cluster.connect([Machine(ADDRESS, 1)], ENTRY)
    (session,) = cluster._sessions.values()
    assert session.call("hold_version", 10.0, folder=str(tmp_path), known="", seconds=1.0) is None


def test_a_machine_that_goes_before_the_port_is_chosen(cluster: RemoteSite) -> None:
    """The error names the machine, and is one after which another attempt may be made."""
    hosts = cluster.connect([Machine(ADDRESS, 1)], ENTRY)
    children = psutil.Process().children()
    (agent,) = [child for child in children if "launch.remote.agent" in " ".join(child.cmdline())]
    agent.kill()
    settings = JobSettings(command=("train.py",), ip_config="ip_config.txt", num_trainers=1)
    with pytest.raises(PreflightError) as caught:
        cluster.plan(hosts, settings)
    assert str(caught.value) == (
        "1 problem on 1 of 1 hosts; nothing was started\n"
        f"  {ADDRESS}  {sys.executable} could not run there: status -9"
    )


def test_a_signal_that_another_thread_receives(cluster: RemoteSite) -> None:
    """Python runs the handler in the main thread, which waits for the threads of the machines."""
    has_run = threading.Event()
    seen: queue.Queue[bool] = queue.Queue()

    def handler(_number: int, _frame: object) -> None:
        has_run.set()
        raise KeyboardInterrupt

    def work(_address: str) -> None:
        time.sleep(1)  # the main thread waits by now
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        seen.put(has_run.wait(10))

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster._run_in_threads(work, [ADDRESS])
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen.get(timeout=20)
