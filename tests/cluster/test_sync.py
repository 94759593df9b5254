"""``--sync`` between hosts that share no folder of the job: stopped, and resumed in another order."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from cluster_faults import ALLOWED_SECONDS, seconds_until, wait_until_trained
from cluster_hosts import ClusterHost
from cluster_jobs import LAUNCHER_LOG, launch, launcher_process
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from fault_sites import BATCH_SIZE, TwoDisks
from faults import LIMIT_SECONDS, run_trials
from tests.cluster.conftest import end_all, finish, sets
from tests.toy_kg import REPOSITORY, toy_dataset

NUM_EPOCHS, MOST_EPOCHS = 14, 24

pytestmark = pytest.mark.usefixtures("warm_runners")


def start(hosts: list[ClusterHost], first: ClusterHost, folder: Path, *more: str, **fields: object):
    """Start or resume the job; the launcher and what belongs to the user are on the first host."""
    settings = {"dataset": "data", "output": "run", "model.dimension": 16, "negatives.num_uniform": 20}
    settings |= {"training.batch_size": 48, "training.num_epochs": NUM_EPOCHS, "checkpoint.every_batches": 1}
    settings |= {"evaluation.split": "test", **fields}
    options = ["--num_trainers", "1", "--sync", "--log_dir", "logs", *more]
    return launch(hosts, folder, options, ["train.py", *sets(settings)], launcher_host=first)


def partitions(host: ClusterHost) -> set[str]:
    return {path.name for path in (host.folder / "data").rglob("part[0-9]*") if path.is_dir()}


def prepare(hosts: list[ClusterHost]) -> None:
    """Give the first host what belongs to the user, and remove what another test has left."""
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


def test_the_best_version_is_restored_on_hosts_that_have_its_parts_no_more(two_hosts, tmp_path):
    """Each reads it from the launcher's folder; the newest version is then the best one."""
    first, second = two_hosts
    prepare(two_hosts)
    log = tmp_path / LAUNCHER_LOG
    fields = {"evaluation.valid_every_epochs": 1, "training.early_stopping.patience": 2, "optimizer.lr": 0.5}
    fields |= {"training.num_epochs": MOST_EPOCHS}
    job = start([second, first], first, tmp_path, **fields)
    assert finish(two_hosts, job) == [0], log.read_text()
    ended, best = map(int, re.search(r"ended after (\d+) epochs; .* after (\d+)", log.read_text()).groups())
    assert best < ended < MOST_EPOCHS
    run, kept = (open_checkpoint(first.folder / "run" / name) for name in ("", "checkpoint/best"))
    run.verify()
    assert run.progress["finished_epochs"] == kept.progress["finished_epochs"] == best
    assert torch.equal(run["entity"][:], kept["entity"][:])


def test_a_job_goes_on_with_its_hosts_in_another_order(two_hosts, tmp_path):
    """It is stopped, loses a connection, then its launcher, in whose folder the versions lie, then these."""
    first, second = two_hosts
    run, log = first.folder / "run", tmp_path / LAUNCHER_LOG
    prepare(two_hosts)
    job = start([first, second], first, tmp_path)
    try:
        wait_until_trained(run / "stats.jsonl", 3, job, log)
        assert partitions(second) == {"part1"}
        launcher_process(first).send_signal(signal.SIGTERM)
        assert job.wait(60) == 143, log.read_text()
        version = open_checkpoint(run)
        done, batches = version.meta.progress["finished_epochs"], version.meta.progress["batches_done"]
        stopped = f"{done} epochs and {batches} batches done"
        assert f"stopped as asked: {stopped}, committed" in log.read_text()
        parts = {path.name.split(".")[0] for path in (second.folder / "run").rglob("embeddings_*.h5")}
        assert parts == {"embeddings_entity_1"}  # its own only

        job = start([second, first], first, tmp_path, "--max_restarts", "1")
        wait_for_version(first, version.version + 2, job, log)
        clients = [process for process in launcher_process(first).children() if process.name() == "ssh"]
        min(clients, key=lambda process: process.create_time()).kill()  # that of the node program
        deadline = time.monotonic() + 60
        while log.read_text().count("resumed: ") < 2:
            assert job.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        assert f"resumed: {stopped}" in log.read_text()
        assert partitions(second) == {"part0", "part1"}  # now it is machine 0
        wait_for_version(first, open_checkpoint(run).version + 2, job, log)
        end_all(two_hosts, job)  # the launcher too
        version = open_checkpoint(run)
        version.verify()
        done = version.meta.progress["finished_epochs"]

        job = start([first, second], first, tmp_path)
        assert job.wait(120) == 0, log.read_text()
        assert f"resumed: {done} epochs and " in log.read_text()
        check_result(two_hosts)

        shutil.rmtree(run)
        job = start([first, second], first, tmp_path)
        assert job.wait(120) == 2, log.read_text()
        assert "the run was removed there, or belongs to another launcher or URL" in log.read_text()
        assert f"{second.work}/run on " in log.read_text()
        assert not (run / "checkpoint").exists()
    finally:
        end_all(two_hosts, job)


def check_result(hosts: list[ClusterHost]) -> None:
    run = open_checkpoint(hosts[0].folder / "run")
    run.verify()
    assert run.meta.progress["finished_epochs"] == NUM_EPOCHS
    assert len(run["entity"][:]) == Dataset.open(toy_dataset(2)).num_entities("entity")
    stats = [json.loads(line) for line in (hosts[0].folder / "run/stats.jsonl").read_text().splitlines()]
    assert {record["epoch"] for record in stats} == set(range(NUM_EPOCHS))
    assert json.loads((hosts[0].folder / "run/metrics.json").read_text())["test"]["both"]["mrr"] > 0.5
    assert not list((hosts[1].folder / "run").rglob("*.tmp"))
    assert not (hosts[0].folder / "run/lease.json").exists()
    assert seconds_until(lambda: not any(host.processes() for host in hosts)) <= ALLOWED_SECONDS


@pytest.mark.timeout(600)
def test_reordered_hosts_lose_nothing_that_was_published(two_hosts, tmp_path):
    prepare(two_hosts)
    random.seed(3)
    dataset = toy_dataset(2)
    num_batches = -(-len(Dataset.open(dataset).split("train")) // BATCH_SIZE)
    site = TwoDisks(tmp_path, dataset, num_batches, LIMIT_SECONDS, two_hosts)
    trials = run_trials(site, ["launcher", "host"])
    faults = ("kill -9 of the launcher", "kill -9 of all on a host")
    results = [(trial.fault, trial.wrong, trial.lost_commits) for trial in trials]
    assert results == [(fault, "", 0) for fault in faults]
