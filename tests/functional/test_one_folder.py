"""Two jobs on one output folder: the second is refused, and a killed one is no obstacle to the next."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from dglkge.checkpoint import open_checkpoint
from tests.functional.job import TRAIN, environment, sets, train_alone, wait_for_line
from tests.toy_kg import toy_dataset


def settings(output: Path, num_epochs: int) -> list[str]:
    return [
        *(f"dataset={toy_dataset()}", f"output={output}", "model.dimension=16", "training.batch_size=48"),
        *("evaluation.split=none", f"training.num_epochs={num_epochs}"),
    ]


def test_a_second_job_is_refused_and_the_next_goes_on_after_kill(tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [sys.executable, TRAIN, *sets(settings(output, 100000))]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment())
    try:
        wait_for_line(output / "stats.jsonl", first, 2)
        config = (output / "config.json").read_bytes()
        second = train_alone(*settings(output, 7), "training.batch_size=24", status=2)
        (line,) = [line for line in second.stderr.splitlines() if "error:" in line]
        assert line.startswith(
            f"train.py: error: {output} is in use: another job writes there, trainer (pid {first.pid}) on "
        )
        assert "Traceback" not in second.stderr
        assert (output / "config.json").read_bytes() == config
        assert first.poll() is None
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    finally:
        first.kill()
        first.wait()
    done = open_checkpoint(output).progress["finished_epochs"]
    third = train_alone(*settings(output, done + 1))
    assert "resumed: " in third.stderr and "is held by" not in third.stderr
    assert not (output / "lease.json").exists()


def test_a_process_of_another_launcher_is_refused(tmp_path: Path, monkeypatch) -> None:
    """Every process of ``srun -n4 train.py`` would train alone, in the same folder."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    done = train_alone(*settings(tmp_path / "run", 1), status=2)
    assert "train.py: error: SLURM_STEP_NUM_TASKS is 4: srun (or another launcher) started 4" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()
