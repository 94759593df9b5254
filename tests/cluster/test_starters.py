"""Jobs on two hosts whose nodes ``mpirun`` (Open MPI) or torchrun starts: ``--node_rank auto``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster_faults import ALLOWED_SECONDS, seconds_until, training_command
from cluster_hosts import ClusterHost
from cluster_jobs import SECRET, environment
from tests.cluster.conftest import end_all
from tests.toy_kg import toy_dataset

pytestmark = pytest.mark.usefixtures("warm_runners")

END_SECONDS = 90
LAUNCH = [sys.executable, "-m", "dglkge.cli.launch", "--node_rank", "auto"]


def mpirun(hosts: Sequence[ClusterHost]) -> list[list[str]]:
    """Return the command of the first host; mpirun reaches the second by ssh."""
    if shutil.which("mpirun") is None:
        pytest.skip("not installed: mpirun (Debian: openmpi-bin)")
    addresses = ",".join(host.address for host in hosts)
    return [
        ["mpirun", "--allow-run-as-root", "--host", addresses, "--map-by", "ppr:1:node", "--tag-output",
         "--mca", "plm_rsh_agent", f"ssh -i {hosts[0].identity}", "-x", "DGLKGE_SECRET", "-x", "PYTHONPATH",
         "-x", "DGLKGE_TIMEOUT_SECONDS",
         *LAUNCH, "--rendezvous", hosts[0].address]
    ]  # fmt: skip


def torchrun(hosts: Sequence[ClusterHost]) -> list[list[str]]:
    """Return the commands of both hosts; torchrun gives the rendezvous as MASTER_ADDR."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    start += [f"--master-addr={hosts[0].address}", "--no-python"]
    return [[*start, f"--node-rank={rank}", *LAUNCH] for rank in range(2)]


@pytest.mark.parametrize("starter", [mpirun, torchrun])
def test_starter(two_hosts: list[ClusterHost], tmp_path: Path, starter):  # type: ignore[no-untyped-def]
    command = training_command(toy_dataset(2), tmp_path / "run")
    command += ["--set", "training.num_epochs=2"]
    options = ["--num_trainers", "1", "--num_omp_threads", "1", "--log_dir", str(tmp_path / "logs")]
    variables = {**environment(), "DGLKGE_SECRET": SECRET, "DGLKGE_TIMEOUT_SECONDS": "60"}
    nodes = []
    try:
        for rank, start in enumerate(starter(two_hosts)):
            with open(tmp_path / f"node{rank}.log", "wb") as log:
                words = [*start, *options, *map(str, command)]
                nodes.append(
                    two_hosts[rank].popen(words, env=variables, stdout=log, stderr=subprocess.STDOUT)
                )
        statuses = [node.wait(END_SECONDS) for node in nodes]
        assert seconds_until(lambda: not any(host.processes() for host in two_hosts)) <= ALLOWED_SECONDS
    finally:
        end_all(two_hosts, *nodes)
    text = "\n".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("node*.log")))
    assert not any(statuses), text
    assert ", 10.77.0.2:" in text, text  # the trainers of node 1
    epochs = [json.loads(line) for line in (tmp_path / "run" / "stats.jsonl").read_text().splitlines()]
    assert len(epochs) == 2
