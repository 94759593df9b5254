"""Results of jobs, and when one is started again: the rule, the pauses, the launcher with small scripts."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import psutil
import pytest

from dglkge.launch import supervisor
from dglkge.launch.machine import usable_cores
from dglkge.launch.supervisor import JobResult, describe_status, exit_status, is_restartable


def result(status: int, is_interrupted: bool = False) -> JobResult:
    return JobResult(status, None if status == 0 else "because", 1.0, "/logs", (), is_interrupted)


@pytest.mark.parametrize(
    ("statuses", "pauses"),
    [
        ([0], []),
        ([2], []),
        # A stop that was asked for starts anew with the pauses, which double after failures in a row.
        ([1, 1, 1, 143, 1, 137, 2], [1, 2, 4, 1, 1, 2]),
        ([1, 143, 9], [1, 1]),
    ],
)
def test_who_is_started_again(statuses, pauses, monkeypatch) -> None:
    """After 143 and failures, not after success and bad input; the status is that of the last attempt."""
    most = 2 if statuses[-1] == 9 else 9
    reports: list[str] = []
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    last = supervisor.run_with_restarts(lambda attempt: result(statuses[attempt]), most, reports.append)
    assert (last.status, slept) == (statuses[-1], pauses)
    expected = [f"restart {number} of {most} in {pause:g} s" for number, pause in enumerate(pauses, start=1)]
    assert [line for line in reports if line.startswith("restart")] == expected
    assert sum("because; logs in /logs" in line for line in reports) == len(pauses)
    assert [supervisor.pause_seconds(count) for count in (0, 1, 4, 5, 6, 99)] == [1, 1, 8, 16, 30, 30]


def test_statuses_and_their_words() -> None:
    assert is_restartable(result(143)) and not is_restartable(result(143, is_interrupted=True))
    statuses = {0: 0, 1: 1, 125: 125, 143: 143, -9: 137, -15: 143, -2: 130}
    assert {status: exit_status(status) for status in statuses} == statuses
    words = {
        3: "ended with status 3",
        -15: "was killed by signal 15 (SIGTERM)",
        -9: "was killed by signal 9 (SIGKILL) [kill -9, or the kernel was out of memory: see dmesg]",
        -7: "was killed by signal 7 (SIGBUS) [often /dev/shm is full: see df -h /dev/shm]",
        143: "ended with status 143, which says: stopped on request, start me again",
        -40: "was killed by signal 40",
    }
    assert {status: describe_status(status) for status in words} == words


BEGIN = """
import os, signal, sys, time
attempt = int(os.environ["DGLKGE_LOG_DIR"][-1])
trainers = int(os.environ["WORLD_SIZE"]) if os.environ["DGL_ROLE"] == "client" else 0
if not trainers:
    sys.exit() if attempt > int(sys.argv[1]) else signal.pause()
print("attempt", attempt, "of", trainers, "by", open(os.environ["DGL_IP_CONFIG"]).read().split(), flush=True)
"""


def test_the_launcher_restarts_with_what_is_there_then(launch, tmp_path: Path, ip_config: Path) -> None:
    script = BEGIN + (
        "if attempt == 1:\n"
        "    while not os.path.exists('go') or os.environ['RANK'] != '0': time.sleep(0.02)\n"
        "    sys.exit(3)\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    options = ["--num_trainers", "1:2", "--max_restarts", "2", "--log_dir", "logs", "--json"]
    job = launch(options, script, "1")
    job.wait_for("attempt 1 of")
    launcher = psutil.Process(job.launcher.pid)
    for process in (launcher, *launcher.children()):  # and its node program
        process.cpu_affinity([min(os.sched_getaffinity(0))])
    ip_config.write_text(f"127.0.0.2 {port}\n")
    (tmp_path / "go").touch()
    output = job.finish()
    assert job.launcher.returncode == 0, output
    assert f"[trainer 0] attempt 1 of {min(2, usable_cores())} by ['127.0.0.1', " in output
    assert f"[trainer 0] attempt 2 of 1 by ['127.0.0.2', '{port}']" in output
    assert "[launcher] attempt 1: trainer 0 (pid " in output and "ended with status 3; logs in " in output
    assert "[launcher] restart 1 of 2 in 1 s" in output
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["attempt-1", "attempt-2"]
    summary = json.loads(output.splitlines()[-1])
    assert (summary["status"], summary["log_dir"]) == (0, str(tmp_path / "logs" / "attempt-2"))
    job.await_none_left()


HELD_UP = BEGIN + "while not os.path.exists(f'go-{attempt}'): time.sleep(0.02)\nsys.exit(1)\n"


def test_trouble_before_a_restart_costs_an_attempt(launch, tmp_path, ip_config, free_port) -> None:
    """A port in use may become free; the last attempt's trouble is a failure, status 1, not bad input."""
    job = launch(["--num_trainers", "1", "--max_restarts", "3", "--log_dir", "logs"], HELD_UP, "2")
    job.wait_for("attempt 1 of")
    with socket.create_server(("127.0.0.1", free_port)):
        (tmp_path / "go-1").touch()
        job.wait_for(f"[launcher] attempt 2: port {free_port} on 127.0.0.1 is in use by pid {os.getpid()}")
    job.wait_for("[trainer 0] attempt 3 of 1 by ")
    ip_config.write_text("host.invalid 30050\n")
    (tmp_path / "go-3").touch()
    output = job.finish()
    assert job.launcher.returncode == 1, output
    assert "[launcher] failed after 0.0 s: no IPv4 address for host 'host.invalid' of ip_config: " in output
