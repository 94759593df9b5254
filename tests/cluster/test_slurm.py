"""examples/slurm/job.sbatch under SLURM itself, with two hosts as its nodes; skips without SLURM."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster_hosts import ClusterHost, cluster_hosts
from cluster_jobs import REPOSITORY, environment
from tests.cluster.conftest import end_all
from tests.toy_kg import toy_dataset

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "munged", "openssl")
WAIT_SECONDS = 90.0

pytestmark = pytest.mark.usefixtures("warm_runners")

SLURM_CONF = """
ClusterName=test
SlurmctldHost={hosts[0].name}({hosts[0].address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=host[0-1] CPUs=1 RealMemory=1000
PartitionName=all Nodes=host[0-1] Default=YES
"""

CONFIGURATION = """
dataset: {dataset}
output: {output}
model: {{dimension: 16}}
negatives: {{num_uniform: 20}}
training: {{batch_size: 200, num_epochs: 1000000}}
evaluation: {{split: none}}
"""


class Slurm:
    """SLURM on two hosts, which see the folder of its files."""

    def __init__(self, hosts: list[ClusterHost], folder: Path) -> None:
        self.folder = folder
        self._first = hosts[0]
        self.started: list[subprocess.Popen[bytes]] = []
        (folder / "slurm.conf").write_text(SLURM_CONF.format(hosts=hosts, folder=folder))
        names = "".join(f"{host.address} {host.name}\n" for host in hosts)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        for name in ("bin", "state"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        program = folder / "bin" / "dglkge-launch"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dglkge.cli.launch "$@"\n')
        program.chmod(0o755)
        path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**environment(), "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        for host in hosts:
            # What munge and SLURM write outside of the folder is on tmpfs; paths of sockets must be short.
            folders = f"mkdir -m 755 /run/munge /run/spool-{host.name}"
            host.run(["sh", "-ec", f"mount --bind {folder}/hosts /etc/hosts; {folders}"], check=True)
            files = {"pid-file": "pid", "log-file": "log", "seed-file": "seed"}
            options = [f"--{option}=/run/munge/{name}" for option, name in files.items()]
            self._start(host, "munged", "--foreground", "--force", f"--key-file={folder}/munge.key", *options)
        self._start(hosts[0], "slurmctld", "-D")
        for host in hosts:
            self._start(host, "slurmd", "-D", "-N", host.name)
        self.wait_for(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2")

    def _start(self, host: ClusterHost, *command: str) -> None:
        with open(self.folder / f"{command[0]}-{host.name}.out", "wb") as log:
            options = {"env": self._environment, "stdout": log, "stderr": subprocess.STDOUT}
            self.started.append(host.popen(command, **options))

    def call(self, *command: str | Path) -> str:
        done = self._first.run(command, env=self._environment, capture_output=True, text=True, timeout=60)
        return done.stdout if done.returncode == 0 else ""

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                logs = [*self.folder.glob("slurm*.log"), *self.folder.glob("*.out")]
                raise AssertionError("\n".join(path.read_text(errors="replace")[-3000:] for path in logs))
            time.sleep(0.2)


@pytest.fixture
def slurm(hosts_can_be_made: None, tmp_path: Path) -> Iterator[Slurm]:
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)} (Debian: slurmctld, slurmd, slurm-client, munge)")
    with cluster_hosts(2) as hosts:
        opened = Slurm(hosts, tmp_path)
        yield opened
        end_all(hosts, *opened.started)


def test_the_job_of_the_example(slurm: Slurm, tmp_path: Path):
    work, output = tmp_path / "work", tmp_path / "output.txt"
    work.mkdir()
    (work / "examples").symlink_to(REPOSITORY / "examples")
    (work / "my.yaml").write_text(CONFIGURATION.format(dataset=toy_dataset(2), output=tmp_path / "run"))
    script = (REPOSITORY / "examples" / "slurm" / "job.sbatch").read_text(encoding="utf-8")
    assert "--num-trainers 4" in script
    script = script.replace("--num-trainers 4", "--num-trainers 1 --num-omp-threads 1")
    (tmp_path / "job.sbatch").write_text(script)
    options = ["--parsable", "--mem=0", "--cpus-per-task=1", f"--chdir={work}", f"--output={output}"]
    job = slurm.call("sbatch", *options, tmp_path / "job.sbatch").strip()
    assert job
    stats = tmp_path / "run" / "stats.jsonl"
    slurm.wait_for(lambda: stats.exists() and stats.read_text().count("\n") >= 2)
    secret = work / f".secret-{job}"
    assert secret.stat().st_mode & 0o777 == 0o600
    slurm.call("scancel", "--signal=TERM", job)
    slurm.wait_for(lambda: "Restarts=1" in slurm.call("scontrol", "show", "job", job))
    text = output.read_text()
    assert "trainer(s) on 10.77.0.1:" in text and ", 10.77.0.2:" in text
    assert "stopped by SIGTERM; all trainers have committed and left" in text
    assert "received SIGTERM: the launcher stops the job" in text  # node 1
    assert "had to be killed" not in text and "lost" not in text
    slurm.call("scancel", job)
