"""The launcher as schedulers, containers and cron start it: signals, limits, environment."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

TRAINS = """
import os, signal, sys
if os.environ["DGL_ROLE"] == "server": sys.exit()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("trains", flush=True)
if sys.argv[1] == "end": sys.exit()
while True: signal.pause()
"""
NEW_PIDS = ["--fork", "--pid", "--mount-proc", "--kill-child", "--"]


def as_first_process() -> list[str]:
    reason = "unshare is not installed"
    for more in ([], ["--map-root-user"]) if shutil.which("unshare") else ():
        command = [shutil.which("unshare"), *more, *NEW_PIDS]
        test = [*command, sys.executable, "-c", ""]
        done = subprocess.run(test, capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            return command
        reason = done.stderr.strip()
    pytest.skip(f"no namespace of process numbers can be made: {reason}")


def launcher_below(starter: subprocess.Popen[str]) -> psutil.Process:
    for process in psutil.Process(starter.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "dglkge.cli.launch" in process.cmdline() and Path(process.exe()).name.startswith("python"):
                return process
    raise AssertionError("the launcher does not run")


def test_sigterm_reaches_the_trainers_of_a_launcher_that_is_process_1(launch, light_path):
    """Trainers commit, which is status 143. The kernel gives process 1 only signals that have a handler."""
    job = launch(["--num_trainers", "2"], TRAINS, "wait", starter=as_first_process(), PYTHONPATH=light_path)
    job.wait_for("[trainer 0] trains", "[trainer 1] trains")
    launcher_below(job.launcher).send_signal(signal.SIGTERM)
    output = job.finish()
    assert job.launcher.returncode == 143, output
    assert "stopped by SIGTERM; all trainers have committed and left" in output


def test_a_low_limit_of_open_files_is_raised_or_named(launch, tmp_path: Path, light_path) -> None:
    """9 processes need 73 files. As under cron there are no variables, not even a PATH."""
    for option, status in (("-S -n", 0), ("-n", 2)):
        shell = f'ulimit {option} 40; exec /usr/bin/env -i PYTHONPATH="$PYTHONPATH" "$@"'
        starter = ["/bin/sh", "-c", shell, "sh"]
        job = launch(["--num_trainers", "8"], TRAINS, "end", starter=starter, PYTHONPATH=light_path)
        output = job.finish()
        assert job.launcher.returncode == status, output
        if status == 0:
            assert output.count("trains") == 8
            shutil.rmtree(tmp_path / "logs")
    words = "dglkge-launch: error: each process of a job of 9 needs 73 open files, and the limit is 40: raise"
    assert output.startswith(words) and "\n" not in output
    assert not (tmp_path / "logs").exists()
