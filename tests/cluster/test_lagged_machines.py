"""A job on two machines that do not wait for one another: ``training.synchronous: false``."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import Popen

import pytest

import dglkge
from cluster_faults import seconds_until, wait_until_trained
from cluster_hosts import ClusterHost
from cluster_jobs import LAUNCHER_LOG, TRAIN, job_process, job_processes, launch
from tests.cluster.conftest import end_all
from tests.toy_kg import toy_dataset


def start(hosts: list[ClusterHost], folder: Path, num_epochs: int) -> Popen[bytes]:
    """Start to train so many epochs of the toy graph on the hosts."""
    settings = {
        "dataset": toy_dataset(2),
        "output": folder / "run",
        "model.dimension": 16,
        "negatives.num_uniform": 20,
        "optimizer.lr": 0.3,
        "training.batch_size": 32,
        "training.num_epochs": num_epochs,
        "training.synchronous": "false",
        "training.max_lag": 2,
        "checkpoint.every_batches": 4,
    }
    command = [TRAIN, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]
    return launch(hosts, folder, ["--num_trainers", "1", "--log_dir", str(folder / "logs")], command)


def finish(job: Popen[bytes], hosts: list[ClusterHost], folder: Path) -> tuple[int, str]:
    """Wait for the end of a job; returns its status and the launcher's output."""
    try:
        status = job.wait(240)
    finally:
        end_all(hosts, job)
    return status, (folder / LAUNCHER_LOG).read_text(encoding="utf-8")


@pytest.mark.usefixtures("warm_runners")
def test_what_is_saved_is_what_all_machines_have(two_hosts, tmp_path):
    """The ranking of the live tables is that of the saved ones, before and after a resume; the loss falls."""
    for num_epochs, before in ((8, 0), (16, 8)):
        status, output = finish(start(two_hosts, tmp_path, num_epochs), two_hosts, tmp_path)
        assert status == 0, output
        assert (f"resumed: {before} epochs and 0 batches done" in output) == (before > 0)
        live = json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]
        saved = dglkge.open_run(tmp_path / "run").evaluate("test").to_dict()
        assert saved["both"]["mrr"] == pytest.approx(live["both"]["mrr"], rel=1e-6)
    assert live["both"]["mrr"] > 0.3
    lines = [json.loads(line) for line in (tmp_path / "run" / "stats.jsonl").read_text().splitlines()]
    losses = [line["epoch_loss"] for line in lines if "epoch_loss" in line]
    assert len(losses) == 16 and losses[-1] < losses[0]


@pytest.mark.parametrize("role", ["server", "client"])
@pytest.mark.usefixtures("warm_runners")
def test_a_peer_that_is_killed_ends_the_job(two_hosts, tmp_path, role):
    job = start(two_hosts, tmp_path, 1_000_000)
    wait_until_trained(tmp_path / "run" / "stats.jsonl", 2, job, tmp_path / LAUNCHER_LOG)
    job_process(two_hosts[1], role).kill()
    try:
        assert job.wait(60) != 0
        assert seconds_until(lambda: not job_processes(two_hosts)) < float("inf")
    finally:
        finish(job, two_hosts, tmp_path)
