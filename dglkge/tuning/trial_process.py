"""Trains one trial in a child process, with a folder of its own, and reads its result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from dglkge.checkpoint.layout import RUN_METRICS_FILE
from dglkge.config import Config
from dglkge.config.load import write_text
from dglkge.errors import JobError
from dglkge.tuning.search import Outcome

CONFIG_FILE = "trial.yaml"
LOG_FILE = "trial.log"
RUN_FOLDER = "run"
MACHINES_FILE = "ip_config.txt"

STOP_SECONDS = 120.0
"""Time for a child to commit and exit after SIGTERM, before SIGKILL."""


def train(config: Config, folder: Path, num_trainers: int, split: str) -> Outcome:
    """Train a configuration, whose output is in a folder, in a child process to its end.

    A run in the folder that was interrupted is resumed. On any exception, KeyboardInterrupt included, the
    child has ended before this returns: SIGTERM lets it commit. The result has the ``evaluation.metric`` of a
    split.

    Parameters
    ----------
    num_trainers : int
        Trainers under dglkge-launch; 0 for one process without servers.

    Raises
    ------
    JobError
        If the child fails; the message has the last line of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, log_path = folder / CONFIG_FILE, folder / LOG_FILE
    write_config(config, path)
    command = [sys.executable]
    if num_trainers > 0:
        (folder / MACHINES_FILE).write_text("127.0.0.1\n", encoding="utf-8")
        command += ["-m", "dglkge.cli.launch", "--ip_config", str(folder / MACHINES_FILE)]
        command += ["--num_trainers", str(num_trainers), "--log_dir", str(folder / "logs")]
    command += ["-m", "dglkge.cli.training_script", "--config", str(path)]
    start = time.monotonic()
    with open(log_path, "ab") as log, _child(command, log.fileno()) as child:
        status = child.wait()
    seconds = time.monotonic() - start
    if status != 0:
        raise JobError(f"the training ended with status {status}: {_last_line(log_path)}; see {log_path}")
    return Outcome(read_metric(Path(config.output), split, config.evaluation.metric), seconds)


def read_metric(run: Path, split: str, metric: str) -> float:
    """Return a metric of both sides that a run has written for a split; JobError if there is none."""
    path = run / RUN_METRICS_FILE
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))[split]["both"][metric])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobError(f"{path} has no {metric} of the {split} split ({error!r})") from None


def write_config(config: Config, path: Path) -> None:
    """Write the fields that differ from their defaults as YAML, atomically."""
    fields = config.model_dump(mode="json", exclude_defaults=True)
    write_text(path, yaml.safe_dump(fields, sort_keys=False, allow_unicode=True))


@contextlib.contextmanager
def _child(command: Sequence[str], log: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a child; at the end of the block it has ended."""
    # In a session of its own: Ctrl-C signals this process only, which then stops the child once.
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(STOP_SECONDS)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                # Its session is its own, so the group has the child and what it started.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _last_line(path: Path) -> str:
    """Return the last line of a log that has text."""
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing was logged"
