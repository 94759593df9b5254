"""A job on two hosts over real ssh: who may connect, and what becomes of it when things die.

One launcher starts the job four times: a trainer dies, then all on a host at once, which leaves its shared
memory, then a host's packets are lost, then the launcher dies.
``make test-cluster`` runs every fault of benchmarks/cluster_faults.py, each with a job of its own.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from cluster_faults import ALLOWED_SECONDS, FAULTS, seconds_until, training_command, wait_until_trained
from cluster_hosts import SSH_PORTS, ClusterHost
from cluster_jobs import LAUNCHER_LOG, PORT, job_processes, launch
from tests import warm
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


@dataclass
class Story:
    """What happened to one launcher and its attempts."""

    listening: list[set[tuple[str, int]]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    num_epochs: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    status: int = 0
    output: str = ""

    def line(self, attempt: int) -> str:
        return next(line for line in self.output.splitlines() if f" attempt {attempt}: " in line)


def live_through(hosts: list[ClusterHost], folder: Path) -> Story:
    story, log, stats = Story(), folder / LAUNCHER_LOG, folder / "run" / "stats.jsonl"
    options = ["--num_trainers", "1", "--max_restarts", "3", "--log_dir", str(folder / "logs")]
    job = launch(hosts, folder, options, training_command(toy_dataset(2), folder / "run"))
    try:
        for name, strike in CHAIN.items():
            before = len(stats.read_text().splitlines()) if stats.exists() else 0
            wait_until_trained(stats, before + 3, job, log)
            story.listening += [host.listening() for host in hosts] if name == "trainer" else []
            victims = job_processes(hosts)
            story.num_epochs[name] = len(stats.read_text().splitlines())
            strike(hosts)
            story.seconds[name] = seconds_until(lambda gone=victims: not any(map(_runs, gone)))
            hosts[1].reconnect()
        seconds_until(lambda: not any(host.processes() for host in hosts))
        story.left = [str(process) for host in hosts for process in host.processes()]
        story.segments = [
            host.run(["ls", "/dev/shm"], capture_output=True, text=True).stdout for host in hosts
        ]
        story.status = job.wait(60)
    finally:
        for process in [process for host in hosts for process in host.processes()]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                process.kill()
        job.kill()
        job.wait()
    story.output = log.read_text(encoding="utf-8")
    return story


def _runs(process) -> bool:
    """Whether a process has not ended."""
    try:
        return process.is_running() and process.status() != "zombie"
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


@pytest.fixture(scope="module")
def story(two_hosts: list[ClusterHost], tmp_path_factory: pytest.TempPathFactory) -> Story:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", warm.runners(os.environ)["PYTHONPATH"])
        return live_through(two_hosts, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("name", CHAIN)
def test_nothing_of_the_job_outlives_the_fault_for_long(story: Story, name: str):
    assert story.seconds[name] <= ALLOWED_SECONDS


def test_the_launcher_says_who_ended_where_and_why(story: Story):
    first, third = story.line(1), story.line(3)
    assert "trainer 1 (pid " in first and " on 10.77.0.2 was killed by signal 9 (SIGKILL)" in first
    assert " on 10.77.0.2 was lost: no heartbeat for 12 s" in third
    assert story.status == -9


def test_the_job_resumes_after_each_fault_but_the_launchers_own(story: Story):
    resumed = [line for line in story.output.splitlines() if "resumed: " in line]
    assert len(resumed) == 3
    for line, name in zip(resumed, CHAIN):
        done = int(line.partition("resumed: ")[2].split()[0])
        assert 1 <= done <= story.num_epochs[name] + 1


def test_nothing_is_left(story: Story):
    assert story.left == [] and story.segments == ["", ""]


def test_the_job_listens_on_the_addresses_of_ip_config_only(story: Story):
    for number, found in enumerate(story.listening):
        address = f"10.77.0.{number + 1}"
        assert {where for where, _ in found} == {address}
        assert (address, PORT) in found and len(found) > len(SSH_PORTS) + 2
