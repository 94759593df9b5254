"""Launched jobs with tables on devices, the CPU in the place of GPUs and gloo in that of NCCL."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.functional import job as commands
from tests.functional.results import assert_near, datasets, metrics, progress
from tests.toy_kg import toy_dataset

ON_DEVICE = ("training.device=cpu_staged", "tables.storage=device")
SETTINGS = (
    *("model.dimension=16", "model.init_scale=0.1", "training.batch_size=48", "negatives.num_uniform=20"),
    *("negatives.chunk_size=24", "training.matmul_dtype=float32", "training.kernels=reference"),
)


def settings(run: Path, *more: str) -> tuple[str, ...]:
    return (f"dataset={toy_dataset(typed=True)}", f"output={run}", *SETTINGS, *more)


def test_a_killed_job_goes_on_at_another_size(tmp_path: Path) -> None:
    """Two trainers, killed; two that go on: bit by bit the tables of two that stage rows of the host. Then
    three; their oracle is a single process on the host, whose sums have another order."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    endless = ("training.num_epochs=100000", "checkpoint.every_batches=1", "evaluation.split=none")
    with commands.training_job(tmp_path, 2, *settings(killed, *ON_DEVICE, *endless)) as job:
        commands.wait_for(killed / "stats.jsonl", job, num_lines=3)
        commands.processes_of(job, "client")[1].send_signal(signal.SIGKILL)
        job.communicate(timeout=60)
    reached = progress(killed)[0]
    until = f"training.num_epochs={reached + 2}"
    done = commands.train(tmp_path, 2, *settings(killed, until, *ON_DEVICE))
    assert "resumed: " in done.stdout + done.stderr
    commands.train(tmp_path, 2, *settings(whole, until, "training.device=cpu_staged"))
    assert len(datasets(whole)) > 6
    assert_near(datasets(killed), datasets(whole), 0, 0)
    assert metrics(killed) == metrics(whole)
    until = f"training.num_epochs={reached + 5}"
    commands.train(tmp_path, 3, *settings(killed, until, *ON_DEVICE))
    commands.train_alone(*settings(whole, until))
    assert_near(datasets(killed), datasets(whole), 1e-3, 1e-5)
    # The live tables were ranked, and these are the files.
    done = commands.dglkge("evaluate", str(killed), "--json")
    assert json.loads(done.stdout)["both"]["mrr"] == pytest.approx(metrics(killed)["both"]["mrr"])


def test_candidates_are_the_rows_that_a_trainer_holds(tmp_path: Path) -> None:
    more = (
        *("training.objective=one_vs_all", "training.relation_prediction=0.5", "training.num_epochs=2"),
        *("optimizer.clip_norm=0.5", "model.score_function=distmult", "evaluation.split=none"),
    )
    commands.train_alone(*settings(tmp_path / "alone", *more))
    commands.train(tmp_path, 3, *settings(tmp_path / "run", *ON_DEVICE, *more))
    assert_near(datasets(tmp_path / "run"), datasets(tmp_path / "alone"), 1e-3, 1e-5)


def test_a_stopped_job_has_committed_what_its_devices_held(tmp_path: Path) -> None:
    """A stop between commits: the rows are written back first. The oracle goes on from there on the host."""
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    # Many batches in an epoch, at the end of which rows are written back in any case.
    small = ("training.batch_size=4", "evaluation.split=none")
    endless = (*small, "training.num_epochs=100000", "checkpoint.every_epochs=0")
    with commands.training_job(tmp_path, 2, *settings(stopped, *ON_DEVICE, *endless)) as job:
        commands.wait_for(stopped / "stats.jsonl", job, 1)
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=60)
    assert job.returncode == 143 and "stopped as asked" in output, output
    until = (*small, f"training.num_epochs={progress(stopped)[0] + 1}")
    for run in (stopped, whole):
        commands.train_alone(*settings(run, *until))
    assert_near(datasets(stopped), datasets(whole), 1e-3, 1e-5)
