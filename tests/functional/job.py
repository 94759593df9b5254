"""Runs the real commands, with time limits, and takes down what they started if a test fails.

Processes begin as copies of one that has imported everything, see :mod:`tests.warm`; ``python`` chooses plain
Python instead: ``PLAIN``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from dglkge.checkpoint.reader import open_checkpoint
from tests import warm
from tests.surroundings import free_ports
from tests.toy_kg import REPOSITORY

TIME_LIMIT_SECONDS = 240
TRAIN = str(REPOSITORY / "examples" / "train.py")
PLAIN = (sys.executable,)


def environment() -> dict[str, str]:
    """Return this process's environment with the repository importable and one thread a process."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", warm.COPIED_BUILD: "1"}


def ip_config(folder: Path) -> Path:
    """Write an ip_config.txt of one machine on a free port."""
    path = folder / "ip_config.txt"
    path.write_text(f"127.0.0.1 {free_ports()}\n", encoding="utf-8")
    return path


def run(
    command: Sequence[str], status: int | None = 0, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, within the limit; it must end with the status, unless that is None."""
    options = {"capture_output": True, "text": True, "timeout": TIME_LIMIT_SECONDS, "cwd": folder}
    done = subprocess.run(command, env={**environment(), **variables}, **options)
    if status is not None and done.returncode != status:
        raise AssertionError(f"ended with {done.returncode}, expected {status}:\n{done.stdout}{done.stderr}")
    return done


def dglkge(*arguments: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run the ``dglkge`` command."""
    return run([*warm.python(), "-m", "dglkge.cli.main", *arguments], status)


def train_alone(*settings: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run the training script with plain python: one process, DGL's standalone mode."""
    return run([*warm.python(), TRAIN, *sets(settings)], status)


def launch_command(
    folder: Path,
    num_trainers: int,
    settings: Sequence[str],
    num_servers: int = 1,
    python: Sequence[str] | None = None,
    script: Sequence[str] = (TRAIN,),
) -> list[str]:
    """Return the command line of a launched training job."""
    return [
        *(python or warm.python()),
        *("-m", "dglkge.cli.launch", "--ip_config", str(ip_config(folder))),
        *("--num_trainers", str(num_trainers), "--num_servers", str(num_servers)),
        *("--num_omp_threads", "1", "--log_dir", str(folder / f"logs{time.monotonic_ns()}")),
        *(*script, *sets(settings)),
    ]


def train(
    folder: Path,
    num_trainers: int,
    *settings: str,
    num_servers: int = 1,
    script: Sequence[str] = (TRAIN,),
    status: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Run the training script under the launcher."""
    return run(launch_command(folder, num_trainers, settings, num_servers, script=script), status)


@contextlib.contextmanager
def started(command: Sequence[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a job whose launcher is an ordinary process, and whose servers and trainers are copies.

    Yields while it runs; then it is told to stop, if it has not ended.
    """
    env = {**warm.runners(environment()), **variables}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        yield job
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(30)
        job.kill()
        job.communicate()


def training_job(
    folder: Path, num_trainers: int, *settings: str
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Start the training script under the launcher."""
    return started(launch_command(folder, num_trainers, settings, python=PLAIN))


def processes_of(job: subprocess.Popen[str], role: str, script: str = "train.py") -> list[psutil.Process]:
    """Return a job's processes of a role (``server`` or ``client``), by rank or server number.

    Copies keep command line and environment of what they copy, so they have names: see :mod:`tests.warm`.
    """
    numbered = warm.processes(role)
    for process in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            env = process.environ()
            if env.get("DGL_ROLE") == role and script in " ".join(process.cmdline()):
                numbered.append((int(env.get("RANK", env.get("DGL_SERVER_ID", "0"))), process))
    return [process for _, process in sorted(numbered, key=lambda pair: pair[0])]


def processes_with(text: str) -> list[psutil.Process]:
    """Return the processes with a text in their command line."""
    every = psutil.process_iter(["cmdline"])
    return [process for process in every if text in " ".join(process.info["cmdline"] or ())]


def wait_for(path: Path, job: subprocess.Popen[str], num_lines: int = 0) -> None:
    """Wait until there is a file, of so many lines; fail if the job ends or the limit passes."""
    limit = time.monotonic() + TIME_LIMIT_SECONDS
    while not path.exists() or len(path.read_text(encoding="utf-8").splitlines()) < num_lines:
        if job.poll() is not None:
            output = job.stdout.read() if job.stdout else ""
            raise RuntimeError(f"the job ended with {job.returncode}:\n{output}")
        if time.monotonic() > limit:
            raise TimeoutError(f"{path} had no {num_lines} lines after {TIME_LIMIT_SECONDS} s")
        time.sleep(0.05)


def sets(settings: Sequence[str]) -> list[str]:
    """Return settings as options of a command."""
    return [word for setting in settings for word in ("--set", setting)]


def kill_and_resume(folder: Path, settings: Callable[..., Sequence[str]], *more: str) -> list[str]:
    """Train ``folder/killed``, kill a trainer and go on with tables in files; train ``folder/whole`` at once.

    Both end two epochs after the kill. ``settings(output, *more)`` are those of a run. Returns what the last
    job of each has printed.
    """
    endless = (*more, "training.num_epochs=100000", "checkpoint.every_batches=1", "evaluation.split=none")
    with training_job(folder, 2, *settings(folder / "killed", *endless)) as job:
        wait_for(folder / "killed" / "stats.jsonl", job, num_lines=4)
        processes_of(job, "client")[1].send_signal(signal.SIGKILL)
        job.communicate(timeout=60)
    reached = open_checkpoint(folder / "killed").meta.progress
    until = f"training.num_epochs={reached['finished_epochs'] + 2}"
    printed = []
    for name, storage in (("killed", ["tables.storage=disk"]), ("whole", [])):
        done = train(folder, 2, *settings(folder / name, *more, until, *storage))
        printed.append(done.stdout + done.stderr)
    return printed
