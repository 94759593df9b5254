"""``--sync`` between hosts that share no folder of the job: stopped, and resumed in another order."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

from cluster_faults import wait_until_trained
from cluster_hosts import ClusterHost
from cluster_jobs import LAUNCHER_LOG, launch
from dglkge.checkpoint import open_checkpoint
from dglkge.data.dataset import Dataset
from tests.toy_kg import REPOSITORY, toy_dataset

NUM_EPOCHS = 40


def start(hosts: list[ClusterHost], first: ClusterHost, folder: Path):
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
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    options = ["--num_trainers", "1", "--sync", "--log_dir", "logs"]
    return launch(hosts, folder, options, ["train.py", *words], launcher_host=first)


def partitions(host: ClusterHost) -> set[str]:
    """Return the partitions that lie on a host."""
    return {path.name for path in (host.folder / "data").rglob("part[0-9]*") if path.is_dir()}


def test_a_job_is_stopped_and_goes_on_with_its_hosts_reversed(two_hosts, tmp_path):
    first, second = two_hosts
    shutil.copytree(toy_dataset(2), first.folder / "data")
    shutil.copy(REPOSITORY / "examples" / "train.py", first.folder)
    log = tmp_path / LAUNCHER_LOG
    job = start([first, second], first, tmp_path)
    try:
        wait_until_trained(first.folder / "run" / "stats.jsonl", 3, job, log)
        assert partitions(second) == {"part1"}
        launcher = next(one for one in first.processes() if "dglkge.cli.launch" in one.cmdline())
        launcher.send_signal(signal.SIGTERM)
        assert job.wait(60) == 143, log.read_text()
        progress = open_checkpoint(first.folder / "run").meta.progress
        stopped = f"{progress['finished_epochs']} epochs and {progress['batches_done']} batches done"
        assert f"stopped as asked: {stopped}, committed" in log.read_text()
        job = start([second, first], first, tmp_path)
        assert job.wait(90) == 0, log.read_text()
    finally:
        for process in [process for host in two_hosts for process in host.processes()]:
            process.kill()
        job.wait()
    assert f"resumed: {stopped}" in log.read_text()
    assert partitions(second) == {"part0", "part1"}  # now it is machine 0
    stats = [json.loads(line) for line in (first.folder / "run" / "stats.jsonl").read_text().splitlines()]
    assert {record["epoch"] for record in stats} == set(range(NUM_EPOCHS))
    run = open_checkpoint(first.folder / "run")
    run.verify()
    assert run.meta.progress["finished_epochs"] == NUM_EPOCHS
    assert len(run["entity"][:]) == Dataset.open(toy_dataset(2)).num_entities("entity")
    assert json.loads((first.folder / "run" / "metrics.json").read_text())["test"]["both"]["mrr"] > 0.5
    assert [process for host in two_hosts for process in host.processes()] == []
