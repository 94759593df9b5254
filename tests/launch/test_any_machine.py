"""The launcher as schedulers, containers and cron start it: signals, limits, paths, environment."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.launch.conftest import TIMEOUT_SECONDS

TRAINS = """
import os, signal, sys
if os.environ["DGL_ROLE"] == "server": sys.exit()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("trains in", os.getcwd(), sys.argv[1:], flush=True)
if sys.argv[1] == "end": sys.exit()
while True: signal.pause()
"""
NEW_PIDS = ["--fork", "--pid", "--mount-proc", "--kill-child", "--"]


def as_first_process() -> list[str]:
    reason = "unshare is not installed"
    for more in ([], ["--map-root-user"]) if shutil.which("unshare") else ():
        command = [shutil.which("unshare"), *more, *NEW_PIDS]
        done = subprocess.run(
            [*command, sys.executable, "-c", ""], capture_output=True, text=True, timeout=60
        )
        if done.returncode == 0:
            return command
        reason = done.stderr.strip()
    pytest.skip(f"no namespace of process numbers can be made: {reason}")


def launcher_of(starter: subprocess.Popen[str]) -> psutil.Process:
    """Return the launcher's process, which may be a child of the program that has started it."""
    for process in [*psutil.Process(starter.pid).children(recursive=True), psutil.Process(starter.pid)]:
        with contextlib.suppress(psutil.Error):
            if "dglkge.cli.launch" in process.cmdline() and "unshare" not in process.cmdline()[0]:
                if Path(process.exe()).name.startswith("python"):
                    return process
    raise AssertionError("the launcher does not run")


def test_sigterm_reaches_the_trainers_of_a_launcher_that_is_process_1(tmp_path, ip_config, light_path):
    """Trainers commit, which is status 143. The kernel gives process 1 only signals that have a handler."""
    words = as_first_process()
    (tmp_path / "job.py").write_text(TRAINS)
    command = [*words, sys.executable, "-m", "dglkge.cli.launch", "--num_trainers", "2", "job.py", "wait"]
    job = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": light_path, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []
    try:
        while sum("trains in" in line for line in lines) < 2:
            line = job.stdout.readline()
            assert line, "".join(lines)
            lines.append(line)
        launcher = launcher_of(job)
        launcher.send_signal(signal.SIGTERM)
        rest, _ = job.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait(TIMEOUT_SECONDS)
    assert job.returncode == 143, rest
    assert "stopped by SIGTERM; all trainers have committed and left" in rest


def run(folder: Path, python_path: str, shell: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(TRAINS)
    command = ["/bin/sh", "-c", f'{shell}; exec "$@"', "sh", sys.executable, "-m", "dglkge.cli.launch"]
    return subprocess.run(
        [*command, *options, "job.py", "end"],
        cwd=folder,
        env={"PYTHONPATH": python_path},
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT_SECONDS,
    )


def test_a_low_limit_of_open_files_is_raised_or_named(tmp_path: Path, ip_config: Path, light_path) -> None:
    """9 processes need 73: a soft limit of 40 is raised, a hard one is an error before any start."""
    done = run(tmp_path, light_path, "ulimit -S -n 40", "--num_trainers", "8")
    assert done.returncode == 0 and done.stdout.count("trains in") == 8, done.stdout + done.stderr
    shutil.rmtree(tmp_path / "logs")
    done = run(tmp_path, light_path, "ulimit -n 40", "--num_trainers", "8")
    assert done.returncode == 2
    assert done.stderr == (
        "dglkge-launch: error: each process of a job of 9 needs 73 open files, and the limit is 40: raise "
        "it (ulimit -n, LimitNOFILE of systemd), or start fewer trainers\n"
    )
    assert not (tmp_path / "logs").exists()
