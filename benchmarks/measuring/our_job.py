"""Runs our training as a real job under the launcher."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dglkge.checkpoint.layout import RUN_METRICS_FILE, RUN_STATS_FILE
from measuring.processes import Finished, run_watched
from measuring.run_figures import Epoch, RunFigures

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "benchmarks" / "timed_train.py"
TIMINGS = "timings.json"
VARIABLES = {"PYTHONPATH": str(REPOSITORY)}
START_MARKS = ("script", "imported", "joined", "built", "training", "first_batch")


def train(
    config: Path | None,
    sets: Sequence[str],
    num_trainers: int,
    folder: Path,
    limit_seconds: float,
    max_batches: int = 0,
    max_epochs: int = 0,
    within: Callable[[list[str]], list[str]] = list,
) -> RunFigures:
    """Run a configuration with one server and some trainers.

    Parameters
    ----------
    config : Path or None
        YAML file.
    sets : sequence of str
        ``key=value`` that override it; ``output`` is set here.
    num_trainers : int
    folder : Path
        New folder for the run, its logs and its timings.
    limit_seconds : float
    max_batches : int
        Leave each epoch after so many batches; 0 trains it whole.
    max_epochs : int
        End after so many epochs, without a last commit; 0 trains the configuration's epochs.
    within : callable
        Makes of the command another one that runs it, in a control group for example.

    Raises
    ------
    RuntimeError
        If the job fails.
    """
    command = within(job_command(config, sets, num_trainers, folder, max_batches, max_epochs))
    done = run_watched(command, folder / "job.log", limit_seconds, VARIABLES)
    return figures(done, json.loads((folder / TIMINGS).read_text("utf-8")), folder / "run", num_trainers)


def job_command(
    config: Path | None,
    sets: Sequence[str],
    num_trainers: int,
    folder: Path,
    max_batches: int = 0,
    max_epochs: int = 0,
) -> list[str]:
    """Return the command of :func:`train`, and make its folder; a second one resumes the run there."""
    folder.mkdir(parents=True, exist_ok=True)
    ip_config, timings = folder / "ip_config.txt", folder / TIMINGS
    ip_config.write_text(f"127.0.0.1 {_free_port()}\n", encoding="utf-8")
    command = [
        *(sys.executable, "-m", "dglkge.cli.launch", "--ip_config", str(ip_config)),
        *("--num_servers", "1", "--num_trainers", str(num_trainers), "--log_dir", str(folder / "logs")),
        *(str(SCRIPT), "--timings", str(timings), "--max-batches", str(max_batches)),
        *("--max-epochs", str(max_epochs)),
        *(() if config is None else ("--config", str(config))),
    ]
    for setting in [*sets, f"output={folder / 'run'}", "training.progress=never"]:
        command += ["--set", setting]
    return command


def figures(done: Finished, timings: dict[str, Any], run: Path, num_trainers: int) -> RunFigures:
    """Combine the job's cost, its timings and its files."""
    marks = timings["marks"]
    # Both clocks are of the same machine, in seconds since the epoch.
    start_marks = {name: marks[name] - done.started_at for name in START_MARKS}
    return RunFigures(
        epochs=[Epoch(**epoch) for epoch in timings["epochs"]],
        wall_seconds=marks["trained"] - marks["training"],
        first_batch_seconds=start_marks["first_batch"],
        peak_bytes=done.peak_bytes,
        processor_seconds=done.processor_seconds,
        job_seconds=done.seconds,
        mrr=_test_mrr(run),
        phase_seconds=_phases(run, num_trainers),
        start_marks=start_marks,
    )


def mean_phases(records: Iterable[dict[str, Any]], num_trainers: int) -> dict[str, float]:
    """Return the time of each phase, in seconds a batch of one trainer, from the lines of stats.jsonl.

    The last line of an epoch has its ``phase_seconds``, summed over trainers; the first epoch counts only
    where there is no other.
    """
    lines = [record for record in records if record.get("phase_seconds")]
    # The first epoch includes the warm-up.
    lines = lines[1:] or lines
    num_batches = sum(record["num_batches"] for record in lines) * num_trainers
    totals: dict[str, float] = {}
    for record in lines:
        for phase, seconds in record["phase_seconds"].items():
            totals[phase] = totals.get(phase, 0.0) + seconds
    return {phase: seconds / num_batches for phase, seconds in totals.items()}


def _phases(run: Path, num_trainers: int) -> dict[str, float]:
    path = run / RUN_STATS_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return mean_phases((json.loads(line) for line in lines), num_trainers)


def _test_mrr(run: Path) -> float | None:
    path = run / RUN_METRICS_FILE
    if not path.exists():
        return None
    return float(json.loads(path.read_text(encoding="utf-8"))["test"]["both"]["mrr"])


def _free_port() -> int:
    """Return a port of loopback without a listener."""
    with socket.socket() as probe:
        # Another program may take the port until the server binds it; the launcher then reports it.
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
