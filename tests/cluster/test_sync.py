"""``--sync`` between hosts that share no folder of the job: stopped, and resumed in another order."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from cluster_faults import ALLOWED_SECONDS, seconds_until, wait_until_trained
from cluster_hosts import ClusterHost
from cluster_jobs import LAUNCHER_LOG, launch
from dglkge.checkpoint import open_checkpoint
from dglkge.data.dataset import Dataset
from tests.cluster.conftest import end_all
from tests.toy_kg import REPOSITORY, toy_dataset

NUM_EPOCHS = 24

pytestmark = pytest.mark.usefixtures("warm_runners")


def start(hosts: list[ClusterHost], first: ClusterHost, folder: Path, *more: str, **fields: object):
    """Start or resume the job; the launcher and what belongs to the user are on the first host."""
    settings = {
        "dataset": "data",
        "output": "run",
        "model.dimension": 16,
        "negatives.num_uniform": 20,
        "training.batch_size": 48,
        "training.num_epochs": NUM_EPOCHS,
        "checkpoint.every_batches": 1,
        "evaluation.split": "test",
        **fields,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    options = ["--num_trainers", "1", "--sync", "--log_dir", "logs", *more]
    return launch(hosts, folder, options, ["train.py", *words], launcher_host=first)


def partitions(host: ClusterHost) -> set[str]:
    return {path.name for path in (host.folder / "data").rglob("part[0-9]*") if path.is_dir()}


def prepare(hosts: list[ClusterHost]) -> None:
    """Clear the hosts, and give the first one what belongs to the user."""
    for host in hosts:
        for path in host.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(toy_dataset(2), hosts[0].folder / "data")
    shutil.copy(REPOSITORY / "examples" / "train.py", hosts[0].folder)


def wait_for_version(host: ClusterHost, version: int, job, log: Path) -> None:
    path = host.folder / "run" / "checkpoint" / "checkpoint_version.txt"
    while not path.exists() or int(path.read_text()) < version:
        assert job.poll() is None, log.read_text()
        time.sleep(0.05)


def test_versions_outlive_the_launcher_and_a_new_order_of_hosts(two_hosts, tmp_path):
    """They lie in the launcher's folder, whichever machine is the first; then the run is removed there."""
    first, second = two_hosts
    prepare(two_hosts)
    log = tmp_path / LAUNCHER_LOG
    job = start([second, first], first, tmp_path)
    try:
        wait_for_version(first, 12, job, log)
        end_all(two_hosts, job)  # the launcher too
        run = open_checkpoint(first.folder / "run")
        run.verify()
        done = run.meta.progress["finished_epochs"]
        assert done > 0
        # The other machine has its own part only.
        parts = {path.name.split(".")[0] for path in (second.folder / "run").rglob("embeddings_*.h5")}
        assert parts == {"embeddings_entity_0"}
        job = start([first, second], first, tmp_path)
        assert job.wait(120) == 0, log.read_text()
        assert f"resumed: {done} epochs and " in log.read_text()
        run = open_checkpoint(first.folder / "run")
        run.verify()
        assert run.meta.progress["finished_epochs"] == NUM_EPOCHS
        assert [(job.first == 1) for job in run.manifest.lineage] == [True, False]

        shutil.rmtree(first.folder / "run")
        job = start([first, second], first, tmp_path)
        assert job.wait(120) == 2, log.read_text()
        assert "the run was removed there, or belongs to another launcher or URL" in log.read_text()
        assert f"{second.work}/run on " in log.read_text()
        assert not (first.folder / "run" / "checkpoint").exists()
    finally:
        end_all(two_hosts, job)


def test_the_best_version_is_restored_on_hosts_that_have_its_parts_no_more(two_hosts, tmp_path):
    """Each reads it from the launcher's folder; the newest version is then the best one."""
    first, second = two_hosts
    prepare(two_hosts)
    log = tmp_path / LAUNCHER_LOG
    fields = {"evaluation.valid_every_epochs": 1, "training.early_stopping.patience": 2, "optimizer.lr": 0.5}
    job = start([second, first], first, tmp_path, **fields)
    try:
        assert job.wait(120) == 0, log.read_text()
    finally:
        end_all(two_hosts, job)
    ended, best = map(int, re.search(r"ended after (\d+) epochs; .* after (\d+)", log.read_text()).groups())
    assert best < ended < NUM_EPOCHS
    run, kept = (open_checkpoint(first.folder / "run" / name) for name in ("", "checkpoint/best"))
    run.verify()
    assert run.progress["finished_epochs"] == kept.progress["finished_epochs"] == best
    assert torch.equal(run["entity"][:], kept["entity"][:])


def launcher_of(host: ClusterHost) -> psutil.Process:
    return next(process for process in host.processes() if "dglkge.cli.launch" in process.cmdline())


def test_a_job_is_stopped_and_goes_on_with_its_hosts_reversed(two_hosts, tmp_path):
    first, second = two_hosts
    prepare(two_hosts)
    log = tmp_path / LAUNCHER_LOG
    job = start([first, second], first, tmp_path)
    try:
        wait_until_trained(first.folder / "run" / "stats.jsonl", 3, job, log)
        assert partitions(second) == {"part1"}
        launcher_of(first).send_signal(signal.SIGTERM)
        assert job.wait(60) == 143, log.read_text()
        progress = open_checkpoint(first.folder / "run").meta.progress
        stopped = f"{progress['finished_epochs']} epochs and {progress['batches_done']} batches done"
        assert f"stopped as asked: {stopped}, committed" in log.read_text()
        version = open_checkpoint(first.folder / "run").version
        job = start([second, first], first, tmp_path, "--max_restarts", "1")
        wait_for_version(first, version + 2, job, log)
        clients = [process for process in launcher_of(first).children() if process.name() == "ssh"]
        min(clients, key=lambda process: process.create_time()).kill()  # that of the node program
        assert job.wait(120) == 0, log.read_text()
    finally:
        end_all(two_hosts, job)
    assert log.read_text().count("resumed: ") == 2
    assert f"resumed: {stopped}" in log.read_text()
    assert partitions(second) == {"part0", "part1"}  # now it is machine 0
    stats = [json.loads(line) for line in (first.folder / "run" / "stats.jsonl").read_text().splitlines()]
    assert {record["epoch"] for record in stats} == set(range(NUM_EPOCHS))
    run = open_checkpoint(first.folder / "run")
    run.verify()
    assert run.meta.progress["finished_epochs"] == NUM_EPOCHS
    assert len(run["entity"][:]) == Dataset.open(toy_dataset(2)).num_entities("entity")
    assert json.loads((first.folder / "run" / "metrics.json").read_text())["test"]["both"]["mrr"] > 0.5
    assert not list((second.folder / "run").rglob("*.tmp"))
    assert not (first.folder / "run" / "lease.json").exists()
    assert seconds_until(lambda: not any(host.processes() for host in two_hosts)) <= ALLOWED_SECONDS
