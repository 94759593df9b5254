"""A job on two hosts without SSH, ``dglkge-launch --node_rank K`` on each: result, faults, refusals."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest

from cluster_faults import ALLOWED_SECONDS, seconds_until, training_command, wait_until_trained
from cluster_hosts import ClusterHost
from cluster_jobs import job_process, launch, launch_node, node_log
from tests.cluster.conftest import end_all
from tests.toy_kg import toy_dataset

END_SECONDS = 60

pytestmark = pytest.mark.usefixtures("warm_runners")


def start(
    hosts: Sequence[ClusterHost],
    folder: Path,
    command: Sequence[str | Path],
    *options: str,
    variables: Sequence[dict[str, str]] = ({}, {}),
    ranks: Sequence[int] = (0, 1),
) -> list[subprocess.Popen[bytes]]:
    """Start the same command on every host; outputs go to ``node<k>.log``."""
    limit = {"DGLKGE_TIMEOUT_SECONDS": "60"}
    return [
        launch_node(hosts[rank], rank, folder, options, command, {**limit, **variables[rank]})
        for rank in ranks
    ]


def text(folder: Path, rank: int) -> str:
    return node_log(folder, rank).read_text(encoding="utf-8", errors="replace")


def node_process(host: ClusterHost) -> psutil.Process:
    """Return dglkge-launch on a host: the oldest process there."""
    return next(process for process in host.processes() if "dglkge.cli.launch" in process.cmdline())


def table(folder: Path) -> np.ndarray:
    (path,) = (folder / "checkpoint" / "latest").glob("embeddings_*_0.v*.h5")
    with h5py.File(path) as file:
        return np.asarray(file["embeddings"])


def test_a_job_without_ssh_gives_the_result_of_one_over_ssh(two_hosts: list[ClusterHost], tmp_path: Path):
    """Addresses are handed out by the first node; both nodes have status 0; no ssh is used."""
    results = []
    for name in ("nodes", "ssh"):
        folder = tmp_path / name
        folder.mkdir()
        command = training_command(toy_dataset(2), folder / "run")
        more = {"training.num_epochs": 2, "training.matmul_dtype": "float32", "seed": 5}
        command += [word for key, value in more.items() for word in ("--set", f"{key}={value}")]
        if name == "nodes":
            nodes = start(two_hosts, folder, command, "--nodes", "2", "--rendezvous", "10.77.0.1")
        else:
            options = ["--num_trainers", "1", "--log_dir", str(folder / "logs")]
            nodes = [launch(two_hosts, folder, options, command)]
        try:
            statuses = [node.wait(END_SECONDS) for node in nodes]
            assert seconds_until(lambda: not any(host.processes() for host in two_hosts)) <= ALLOWED_SECONDS
        finally:
            end_all(two_hosts, *nodes)
        if name == "nodes":
            assert statuses == [0, 0], text(folder, 0) + text(folder, 1)
            assert "trainer(s) on 10.77.0.1:" in text(folder, 0) and ", 10.77.0.2:" in text(folder, 0)
            assert (folder / "logs" / "trainer-1.log").exists()
        results.append(table(folder / "run"))
    assert np.allclose(*results, rtol=1e-4, atol=1e-5)


def test_faults(two_hosts: list[ClusterHost], tmp_path: Path):
    """After each fault but the last the job restarts; a node that was lost is started again by hand.

    Nothing outlives the last one, on either host. test_rendezvous.py has packets and launchers that are lost.
    """
    ip_config, stats = tmp_path / "ip_config.txt", tmp_path / "run" / "stats.jsonl"
    ip_config.write_text("10.77.0.1\n10.77.0.2\n")
    command = training_command(toy_dataset(2), tmp_path / "run")
    options = ["--ip_config", str(ip_config), "--max_restarts", "2"]
    nodes = start(two_hosts, tmp_path, command, *options)
    try:
        for fault in ("trainer", "node", "signal"):
            before = stats.read_text().count("\n") if stats.exists() else 0
            wait_until_trained(stats, before + 2, nodes[0], tmp_path / "node0.log")
            listening = two_hosts[1].listening()
            if fault == "trainer":
                job_process(two_hosts[1], "client").kill()
            elif fault == "signal":
                node_process(two_hosts[1]).terminate()
            else:
                node_process(two_hosts[1]).kill()
                nodes[-1].wait(END_SECONDS)
                nodes += start(two_hosts, tmp_path, command, *options, ranks=(1,))
        assert seconds_until(lambda: not any(host.processes() for host in two_hosts)) <= ALLOWED_SECONDS
        statuses = [node.wait(END_SECONDS) for node in nodes]
        assert statuses == [143, -9, 143], text(tmp_path, 0) + text(tmp_path, 1)
    finally:
        end_all(two_hosts, *nodes)
    first, second = text(tmp_path, 0), text(tmp_path, 1)
    assert {address for address, _ in listening} == {"10.77.0.2"}  # no port for the launcher
    assert "attempt 1: trainer 1 (pid " in first
    assert " on 10.77.0.2 was killed by signal 9 (SIGKILL)" in first
    assert "node 1 (10.77.0.2) is lost: the connection ended" in first
    assert "node 1 (10.77.0.2) received SIGTERM: stopping the job" in first
    assert "all trainers have committed and left" in second
    for host in two_hosts:
        assert host.run(["ls", "/dev/shm"], capture_output=True, text=True).stdout == ""


def test_nodes_that_do_not_come(two_hosts: list[ClusterHost], tmp_path: Path):
    """Waits have limits; the message names the missing node. A wrong secret is one line."""
    command = training_command(toy_dataset(2), tmp_path / "run")
    options = ["--nodes", "2", "--rendezvous", "10.77.0.1", "--rendezvous_seconds", "4"]
    secrets = ({}, {"DGLKGE_SECRET": "x" * 20})
    nodes = start(two_hosts, tmp_path, command, *options, variables=secrets)
    try:
        assert [node.wait(END_SECONDS) for node in nodes] == [2, 2]
    finally:
        end_all(two_hosts, *nodes)
    assert "error: node 1 of 2 did not connect to 10.77.0.1:29450 within 4 s" in text(tmp_path, 0)
    assert "refused 10.77.0.2: wrong secret" in text(tmp_path, 0)
    assert "error: node 0 at 10.77.0.1:29450 refuses node 1: wrong secret: --secret_file" in text(tmp_path, 1)


def test_a_rendezvous_over_ipv6(two_hosts: list[ClusterHost], tmp_path: Path):
    """Nodes meet over IPv6; each gives its IPv4 address for the traffic of DGL and gloo."""
    nodes = []
    try:
        for rank, host in enumerate(two_hosts):
            host.run(f"ip -6 address add fd77::{rank + 1}/64 dev eth0 nodad".split(), check=True)
        for rank, host in enumerate(two_hosts):
            options = ["--nodes", "2", "--rendezvous", "fd77::1", "--address", host.address, "--dry_run"]
            command = training_command(toy_dataset(2), tmp_path / "run")
            nodes += start(two_hosts, tmp_path, command, *options, ranks=(rank,))
        assert [node.wait(END_SECONDS) for node in nodes] == [0, 0], text(tmp_path, 0) + text(tmp_path, 1)
    finally:
        end_all(two_hosts, *nodes)
        for rank, host in enumerate(two_hosts):
            host.run(f"ip -6 address del fd77::{rank + 1}/64 dev eth0".split(), capture_output=True)
    assert "connected to fd77::1:29450" in text(tmp_path, 1)
    plan = text(tmp_path, 0)
    for rank in (0, 1):
        assert f"# trainer {rank} on 10.77.0.{rank + 1}\n" in plan
    assert plan.count("GLOO_SOCKET_IFNAME=eth0") == 4 and plan.count("MASTER_ADDR=10.77.0.1") == 2
