"""``dglkge job list`` and ``dglkge job stop``: what they print, whom they signal, whom they refuse."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dglkge.distributed.jobs import JobEntry, Registration, process_start
from dglkge.distributed.lease import new_nonce

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = """
import os, signal, socket, sys
from dglkge.distributed.jobs import JobEntry, Registration
from dglkge.distributed.jobs import process_start
job, run, num_signals = sys.argv[1], sys.argv[2], int(sys.argv[3])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
pid = os.getpid()
launcher = {"host": socket.gethostname(), "launcher_pid": pid, "launcher_started": process_start(pid)}
entry = Registration(JobEntry(job, user="ann", run=run, log_dir="/logs", **launcher))
print("ready", flush=True)
for _ in range(num_signals):
    signal.sigwait([signal.SIGTERM])
    print("signal", flush=True)
entry.release()
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator:
    """Start a process that is registered as a job's launcher and ends after so many SIGTERM."""
    started: list[subprocess.Popen[bytes]] = []

    def start(num_signals: int) -> str:
        job = new_nonce()
        command = [sys.executable, "-c", LAUNCHER, job, str(tmp_path / job), str(num_signals)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
        assert started[-1].stdout.readline() == b"ready\n"
        return job

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_list(launcher, tmp_path, shown, report):
    job = launcher(1)
    (line,) = [line for line in shown("jobs").splitlines() if job in line.split()]
    assert " ann " in line and line.endswith(str(tmp_path / job))
    (entry,) = [entry for entry in report("jobs") if entry["job"] == job]
    assert entry["run"] == str(tmp_path / job) and entry["is_launched_here"]
    assert entry["allocated_shared_memory_bytes"] == 0


@pytest.mark.parametrize("by", ["run", "job", "beginning"])
def test_stop(launcher, tmp_path, by, shown, refusal):
    job = launcher(1)
    name = {"run": str(tmp_path / job), "job": job, "beginning": job[:12]}[by]
    line = shown("stop", name, "--seconds", "30")
    assert line.startswith(f"stopped job {job} of user ann, launcher pid ")
    assert f"no job of this machine matches {name!r}; running: " in refusal("stop", name)


def test_stop_now_is_a_second_signal(launcher, call, shown):
    """One signal lets the trainers commit; the limit of the wait is kept."""
    status, _, err = call("stop", launcher(2), "--seconds", "0.3")
    assert status == 1 and "still runs after 0.3 s; --now ends it without a commit" in err
    shown("stop", launcher(2), "--now", "--seconds", "30")


@pytest.mark.parametrize("seconds", ["0", "nan", "1e9"])
def test_limits(seconds, refusal):
    assert "--seconds must be 0.1 to 86400, got" in refusal("stop", "x", "--seconds", seconds)


def test_who_cannot_be_stopped_from_here(monkeypatch, refusal):
    """A job whose launcher is on another machine, and another user's: one line each, and no signal sent."""
    sent: list[tuple[int, int]] = []

    def refuse(pid: int, number: int) -> None:
        sent.append((pid, number))
        raise PermissionError

    monkeypatch.setattr("dglkge.cli.jobs.os.kill", refuse)
    pid = os.getpid()
    here, away = (
        Registration(JobEntry(new_nonce(), "", host, launcher_pid=pid, launcher_started=process_start(pid)))
        for host in (socket.gethostname(), "far")
    )
    try:
        assert "was launched from another machine: stop it there" in refusal("stop", away.entry.job)
        assert sent == []
        assert "is not yours to stop" in refusal("stop", here.entry.job)
        assert sent == [(os.getpid(), signal.SIGTERM)]
    finally:
        here.release()
        away.release()
