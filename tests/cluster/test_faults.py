"""A job on two hosts over real ssh when things die; ``make test-cluster`` has more."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

import dglkge
from cluster_faults import ALLOWED_SECONDS, FAULTS, seconds_until, training_command, wait_until_trained
from cluster_hosts import SSH_PORTS, ClusterHost
from cluster_jobs import LAUNCHER_LOG, PORT, TRAIN, job_process, job_processes, launch
from tests.cluster.conftest import end_all, finish, sets
from tests.toy_kg import toy_dataset

pytestmark = pytest.mark.usefixtures("warm_runners")


def kill_all_at_once(hosts: list[ClusterHost]) -> None:
    victims = hosts[1].processes()
    for process in victims:
        process.suspend()
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):  # the kernel has ended it with its parent
            process.kill()


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it ended between the two questions
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_job_lives_through_faults(two_hosts: list[ClusterHost], tmp_path: Path):
    """Nothing outlives a fault for long, and the job resumes; it listens on ip_config's addresses only."""
    log, stats, num_epochs = tmp_path / LAUNCHER_LOG, tmp_path / "run" / "stats.jsonl", []
    options = ["--num_trainers", "1", "--max_restarts", "3", "--log_dir", str(tmp_path / "logs")]
    job = launch(two_hosts, tmp_path, options, training_command(toy_dataset(2), tmp_path / "run"))
    try:
        for name in ("trainer", "host", "packets", "launcher"):
            before = len(stats.read_text().splitlines()) if stats.exists() else 0
            wait_until_trained(stats, before + 3, job, log)
            if name == "trainer":
                for host in two_hosts:
                    endpoints = host.listening()
                    assert {where for where, _ in endpoints} == {host.address}
                    assert (host.address, PORT) in endpoints and len(endpoints) > len(SSH_PORTS) + 2
            victims = job_processes(two_hosts)
            strike = kill_all_at_once if name == "host" else FAULTS[name].strike
            strike(two_hosts)
            seconds = seconds_until(lambda gone=victims: not any(map(_runs, gone)))
            # Now, and not before the blow: an epoch may end until it is felt.
            num_epochs.append(len(stats.read_text().splitlines()))
            assert seconds <= ALLOWED_SECONDS, name
            two_hosts[1].reconnect()
        assert seconds_until(lambda: not any(host.processes() for host in two_hosts)) <= ALLOWED_SECONDS
        for host in two_hosts:
            assert host.run(["ls", "/dev/shm"], capture_output=True, text=True).stdout == ""
        assert job.wait(60) == -9
    finally:
        end_all(two_hosts, job)
    lines = log.read_text(encoding="utf-8").splitlines()
    first, third = (next(line for line in lines if f" attempt {number}: " in line) for number in (1, 3))
    assert "trainer 1 (pid " in first and " on 10.77.0.2 was killed by signal 9 (SIGKILL)" in first
    assert " on 10.77.0.2 was lost: no heartbeat for 12 s" in third
    resumed = [int(line.partition("resumed: ")[2].split()[0]) for line in lines if "resumed: " in line]
    assert len(resumed) == 3
    assert all(1 <= done <= before + 1 for done, before in zip(resumed, num_epochs))


def start_lagged(hosts: list[ClusterHost], folder: Path, num_epochs: int) -> Popen[bytes]:
    """Start to train so many epochs on hosts that do not wait for one another."""
    settings = {"dataset": toy_dataset(2), "output": folder / "run", "model.dimension": 16}
    settings |= {"negatives.num_uniform": 20, "optimizer.lr": 0.3, "checkpoint.every_batches": 4}
    settings |= {"training.batch_size": 32, "training.num_epochs": num_epochs}
    settings |= {"training.synchronous": "false", "training.max_lag": 2}
    options = ["--num_trainers", "1", "--log_dir", str(folder / "logs")]
    return launch(hosts, folder, options, [TRAIN, *sets(settings)])


def test_what_is_saved_is_what_all_lagged_machines_have(two_hosts, tmp_path):
    for num_epochs, before in ((8, 0), (16, 8)):
        statuses = finish(two_hosts, start_lagged(two_hosts, tmp_path, num_epochs))
        output = (tmp_path / LAUNCHER_LOG).read_text(encoding="utf-8")
        assert statuses == [0], output
        assert (f"resumed: {before} epochs and 0 batches done" in output) == (before > 0)
        live = json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]
        saved = dglkge.open_run(tmp_path / "run").evaluate("test").to_dict()
        assert saved["both"]["mrr"] == pytest.approx(live["both"]["mrr"], rel=1e-6)
    assert live["both"]["mrr"] > 0.3
    lines = [json.loads(line) for line in (tmp_path / "run" / "stats.jsonl").read_text().splitlines()]
    losses = [line["epoch_loss"] for line in lines if "epoch_loss" in line]
    assert len(losses) == 16 and losses[-1] < losses[0]


def test_a_lagged_trainer_that_is_killed_ends_the_job(two_hosts, tmp_path):
    job = start_lagged(two_hosts, tmp_path, 1_000_000)
    wait_until_trained(tmp_path / "run" / "stats.jsonl", 2, job, tmp_path / LAUNCHER_LOG)
    job_process(two_hosts[1], "client").kill()
    assert finish(two_hosts, job) != [0]
