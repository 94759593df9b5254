"""A job on two hosts over real ssh: who may connect, and what becomes of it when things die.

One launcher starts the job four times: a trainer dies, then all on a host at once, which leaves its shared
memory, then a host's packets are lost, then the launcher dies.
``make test-cluster`` runs every fault of benchmarks/cluster_faults.py, each with a job of its own.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest

from cluster_faults import ALLOWED_SECONDS, FAULTS, seconds_until, training_command, wait_until_trained
from cluster_hosts import SSH_PORTS, ClusterHost
from cluster_jobs import LAUNCHER_LOG, PORT, job_processes, launch
from tests.cluster.conftest import end_all
from tests.toy_kg import toy_dataset


def kill_all_at_once(hosts: list[ClusterHost]) -> None:
    victims = hosts[1].processes()
    for process in victims:
        process.suspend()
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):  # the kernel has ended it with its parent
            process.kill()


CHAIN = {
    "trainer": FAULTS["trainer"].strike,
    "host": kill_all_at_once,
    "packets": FAULTS["packets"].strike,
    "launcher": FAULTS["launcher"].strike,
}


def _runs(process) -> bool:
    """Whether a process has not ended."""
    try:
        return process.is_running() and process.status() != "zombie"
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


@pytest.mark.usefixtures("warm_runners")
def test_a_job_lives_through_faults(two_hosts: list[ClusterHost], tmp_path: Path):
    """Nothing outlives a fault for long, the launcher says who ended, and the job resumes but after its own.

    It listens on the addresses of ip_config only.
    """
    log, stats, num_epochs = tmp_path / LAUNCHER_LOG, tmp_path / "run" / "stats.jsonl", []
    options = ["--num_trainers", "1", "--max_restarts", "3", "--log_dir", str(tmp_path / "logs")]
    job = launch(two_hosts, tmp_path, options, training_command(toy_dataset(2), tmp_path / "run"))
    try:
        for name, strike in CHAIN.items():
            before = len(stats.read_text().splitlines()) if stats.exists() else 0
            wait_until_trained(stats, before + 3, job, log)
            if name == "trainer":
                for host in two_hosts:
                    endpoints = host.listening()
                    assert {where for where, _ in endpoints} == {host.address}
                    assert (host.address, PORT) in endpoints and len(endpoints) > len(SSH_PORTS) + 2
            victims = job_processes(two_hosts)
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
