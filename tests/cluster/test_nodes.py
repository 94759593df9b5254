"""A job on two hosts without SSH, ``dglkge-launch --node_rank K`` on each: result, faults, IPv6."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cluster_faults import ALLOWED_SECONDS, seconds_until, training_command, wait_until_trained
from cluster_hosts import ClusterHost
from cluster_jobs import SECRET, environment, job_process, launch, launch_node, launcher_process, node_log
from dglkge.checkpoint.reader import open_checkpoint
from tests.cluster.conftest import end_all, finish, sets
from tests.toy_kg import toy_dataset

pytestmark = pytest.mark.usefixtures("warm_runners")


def start(hosts, folder: Path, command, *options: str, ranks=(0, 1)) -> list[subprocess.Popen[bytes]]:
    """Start the same command on every host; outputs go to ``node<k>.log``."""
    limit = {"DGLKGE_TIMEOUT_SECONDS": "60"}
    return [launch_node(hosts[rank], rank, folder, options, command, limit) for rank in ranks]


def text(folder: Path, rank: int) -> str:
    return node_log(folder, rank).read_text(encoding="utf-8", errors="replace")


def test_a_job_without_ssh_gives_the_result_of_one_over_ssh(two_hosts: list[ClusterHost], tmp_path: Path):
    results = []
    more = {"training.num_epochs": 2, "training.matmul_dtype": "float32", "seed": 5}
    for name in ("nodes", "ssh"):
        folder = tmp_path / name
        folder.mkdir()
        command = [*training_command(toy_dataset(2), folder / "run"), *sets(more)]
        if name == "nodes":
            nodes = start(two_hosts, folder, command, "--nodes", "2", "--rendezvous", "10.77.0.1")
        else:
            options = ["--num_trainers", "1", "--log_dir", str(folder / "logs")]
            nodes = [launch(two_hosts, folder, options, command)]
        statuses = finish(two_hosts, *nodes)
        if name == "nodes":
            assert statuses == [0, 0], text(folder, 0) + text(folder, 1)
            assert "trainer(s) on 10.77.0.1:" in text(folder, 0) and ", 10.77.0.2:" in text(folder, 0)
            assert (folder / "logs" / "trainer-1.log").exists()
        results.append(open_checkpoint(folder / "run")["entity"][:])
    assert torch.allclose(*results, rtol=1e-4, atol=1e-5)


def test_faults(two_hosts: list[ClusterHost], tmp_path: Path):
    """After each fault but the last the job restarts; a node that was lost is started again by hand."""
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
                launcher_process(two_hosts[1]).terminate()
            else:
                launcher_process(two_hosts[1]).kill()
                nodes[-1].wait(60)
                nodes += start(two_hosts, tmp_path, command, *options, ranks=(1,))
        assert seconds_until(lambda: not any(host.processes() for host in two_hosts)) <= ALLOWED_SECONDS
        statuses = [node.wait(60) for node in nodes]
    finally:
        end_all(two_hosts, *nodes)
    first, second = text(tmp_path, 0), text(tmp_path, 1)
    assert statuses == [143, -9, 143], first + second
    assert {address for address, _ in listening} == {"10.77.0.2"}  # no port for the launcher
    assert re.search(r"attempt 1: trainer 1 .* on 10\.77\.0\.2 was killed by signal 9 \(SIGKILL\)", first)
    assert "node 1 (10.77.0.2) is lost: the connection ended" in first
    assert "node 1 (10.77.0.2) received SIGTERM: stopping the job" in first
    assert "all trainers have committed and left" in second
    for host in two_hosts:
        assert host.run(["ls", "/dev/shm"], capture_output=True, text=True).stdout == ""


def test_a_rendezvous_over_ipv6(two_hosts: list[ClusterHost], tmp_path: Path):
    nodes, command = [], training_command(toy_dataset(2), tmp_path / "run")
    for rank, host in enumerate(two_hosts):
        host.run(f"ip -6 address add fd77::{rank + 1}/64 dev eth0 nodad".split(), check=True)
    for rank, host in enumerate(two_hosts):
        options = ["--nodes", "2", "--rendezvous", "fd77::1", "--address", host.address, "--dry_run"]
        nodes += start(two_hosts, tmp_path, command, *options, ranks=(rank,))
    statuses = finish(two_hosts, *nodes)
    for rank, host in enumerate(two_hosts):
        host.run(f"ip -6 address del fd77::{rank + 1}/64 dev eth0".split(), capture_output=True)
    assert statuses == [0, 0], text(tmp_path, 0) + text(tmp_path, 1)
    assert "connected to fd77::1:29450" in text(tmp_path, 1)
    plan = text(tmp_path, 0)
    for rank in (0, 1):
        assert f"# trainer {rank} on 10.77.0.{rank + 1}\n" in plan
    assert plan.count("GLOO_SOCKET_IFNAME=eth0") == 4 and plan.count("MASTER_ADDR=10.77.0.1") == 2


LAUNCH = [sys.executable, "-m", "dglkge.cli.launch", "--node_rank", "auto"]


def mpirun(hosts: Sequence[ClusterHost]) -> list[list[str]]:
    """Return the command of the first host; mpirun reaches the second by ssh."""
    if shutil.which("mpirun") is None:
        pytest.skip("not installed: mpirun (Debian: openmpi-bin)")
    words = ["mpirun", "--allow-run-as-root", "--map-by", "ppr:1:node", "--tag-output"]
    words += ["--host", ",".join(host.address for host in hosts)]
    words += ["--mca", "plm_rsh_agent", f"ssh -i {hosts[0].identity}"]
    words += ["-x", "DGLKGE_SECRET", "-x", "PYTHONPATH", "-x", "DGLKGE_TIMEOUT_SECONDS"]
    return [[*words, *LAUNCH, "--rendezvous", hosts[0].address]]


def torchrun(hosts: Sequence[ClusterHost]) -> list[list[str]]:
    """Return the commands of both hosts; torchrun gives the rendezvous as MASTER_ADDR."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    start += [f"--master-addr={hosts[0].address}", "--no-python"]
    return [[*start, f"--node-rank={rank}", *LAUNCH] for rank in range(2)]


@pytest.mark.parametrize("starter", [mpirun, torchrun])
def test_starter(two_hosts: list[ClusterHost], tmp_path: Path, starter):  # type: ignore[no-untyped-def]
    command = [*training_command(toy_dataset(2), tmp_path / "run"), *sets({"training.num_epochs": 2})]
    options = ["--num_trainers", "1", "--num_omp_threads", "1", "--log_dir", str(tmp_path / "logs")]
    variables = {**environment(), "DGLKGE_SECRET": SECRET, "DGLKGE_TIMEOUT_SECONDS": "60"}
    nodes = []
    for rank, start in enumerate(starter(two_hosts)):
        words = [*start, *options, *map(str, command)]
        with open(tmp_path / f"node{rank}.log", "wb") as log:
            streams = {"stdout": log, "stderr": subprocess.STDOUT}
            nodes.append(two_hosts[rank].popen(words, env=variables, **streams))
    statuses = finish(two_hosts, *nodes)
    text = "\n".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("node*.log")))
    assert not any(statuses) and ", 10.77.0.2:" in text, text  # the trainers of node 1
    epochs = [json.loads(line) for line in (tmp_path / "run" / "stats.jsonl").read_text().splitlines()]
    assert len(epochs) == 2
