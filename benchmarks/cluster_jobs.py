"""Jobs on the hosts of ``cluster_hosts.py``: their data, the launcher on the first host, their processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil

from cluster_hosts import ClusterHost

REPOSITORY = Path(__file__).resolve().parents[1]
TRAIN = REPOSITORY / "examples" / "train.py"
PORT = 30050
LAUNCHER_LOG = "launcher.log"
SECRET = "of the jobs without SSH on these hosts"
COMMUNITY = 500


def make_dataset(
    folder: Path, num_parts: int, num_entities: int, num_triples: int, num_relations: int, method: str
) -> Path:
    """Partition a random graph like real ones: few entities in many triples, and communities.

    Of ten triples nine stay within a community of 500 entities.

    Parameters
    ----------
    folder : Path
        Where the triples and the data set go.
    num_parts, num_entities, num_triples, num_relations : int
    method : str
        ``metis`` or ``random``.

    Returns
    -------
    Path
        Folder of the data set.
    """
    random = np.random.default_rng(0)
    names = np.array([f"e{number}" for number in range(num_entities)])
    # Squared uniform numbers: small ids are frequent, as a few entities of real graphs are.
    heads, anywhere = (num_entities * random.random((2, num_triples)) ** 2).astype(np.int64)
    nearby = heads - heads % COMMUNITY + (COMMUNITY * random.random(num_triples) ** 2).astype(np.int64)
    stays = (random.random(num_triples) < 0.9) & (nearby < num_entities)
    tails = np.where(stays, nearby, anywhere)
    relations = random.integers(num_relations, size=num_triples)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "train.tsv", "w", encoding="utf-8") as file:
        for head, tail, relation in zip(heads, tails, relations):
            file.write(f"{names[head]}\tr{relation}\t{names[tail]}\n")
    command = [
        sys.executable,
        REPOSITORY / "partition_tools" / "partition.py",
        "--input",
        folder / "train.tsv",
    ]
    command += ["--split", "0.98,0.01,0.01", "--output", folder / f"parts{num_parts}"]
    command += ["--num-parts", str(num_parts), "--method", method]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL, env=environment())
    return folder / f"parts{num_parts}"


def environment() -> dict[str, str]:
    """Return this process's environment with the repository importable."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def launch(
    hosts: Sequence[ClusterHost],
    folder: Path,
    options: Sequence[str],
    command: Sequence[str | Path],
    variables: Mapping[str, str] | None = None,
    launcher_host: ClusterHost | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``dglkge-launch`` on one of the hosts for a job on all of them.

    Parameters
    ----------
    hosts : sequence of ClusterHost
    folder : Path
        For ip_config.txt; every host sees it. The launcher's output goes to ``launcher.log`` there.
    options : sequence of str
        Of the launcher, beside those that name the hosts.
    command : sequence of str or Path
        The script and its arguments.
    variables : mapping of str to str, optional
        For the launcher's environment.
    launcher_host : ClusterHost, optional
        The first one if not given.
    """
    ip_config = folder / "ip_config.txt"
    ip_config.write_text("".join(f"{host.address} {PORT}\n" for host in hosts), encoding="ascii")
    launcher: list[str | Path] = [sys.executable, "-m", "dglkge.cli.launch", "--ip_config", ip_config]
    # One thread for each trainer: the hosts share the cores of this machine.
    launcher += ["--identity_file", hosts[0].identity, "--num_omp_threads", "1", "--json"]
    variables = {**environment(), **(variables or {})}
    with open(folder / LAUNCHER_LOG, "w", encoding="utf-8") as log:
        line = [*launcher, *options, *command]
        return (launcher_host or hosts[0]).popen(line, env=variables, stdout=log, stderr=subprocess.STDOUT)


def launch_node(
    host: ClusterHost,
    rank: int,
    folder: Path,
    options: Sequence[str | Path],
    command: Sequence[str | Path],
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``dglkge-launch --node_rank`` on a host: its part of a job without SSH.

    Parameters
    ----------
    host : ClusterHost
    rank : int
        0 is the launcher.
    folder : Path
        Every host sees it. The output is appended to ``node<rank>.log`` there.
    options : sequence of str or Path
        Of the launcher.
    command : sequence of str or Path
        The script and its arguments.
    variables : mapping of str to str, optional
        For its environment.
    """
    line: list[str | Path] = [sys.executable, "-m", "dglkge.cli.launch", "--node_rank", str(rank)]
    line += ["--num_trainers", "1", "--num_omp_threads", "1", "--log_dir", folder / "logs"]
    node_environment = {**environment(), "DGLKGE_SECRET": SECRET, **(variables or {})}
    with open(node_log(folder, rank), "ab") as log:
        return host.popen(
            [*line, *options, *command], env=node_environment, stdout=log, stderr=subprocess.STDOUT
        )


def node_log(folder: Path, rank: int) -> Path:
    """Return the file with the output of a node."""
    return folder / f"node{rank}.log"


def job_process(host: ClusterHost, role: str) -> psutil.Process:
    """Return the oldest server (``server``) or trainer (``client``) of the job on a host.

    Raises
    ------
    RuntimeError
        If none runs.
    """
    for process in host.processes():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("DGL_ROLE") == role:
                return process
    raise RuntimeError(f"no {role} runs on {host.name}")


def job_processes(hosts: Sequence[ClusterHost]) -> list[psutil.Process]:
    """Return the servers and trainers of the job."""
    processes = []
    for host in hosts:
        for process in host.processes():
            with contextlib.suppress(psutil.Error):
                if "DGL_ROLE" in process.environ():
                    processes.append(process)
    return processes


def launcher_process(host: ClusterHost) -> psutil.Process:
    """Return the launcher, which runs on a host.

    Raises
    ------
    RuntimeError
        If it does not.
    """
    for process in host.processes():
        with contextlib.suppress(psutil.Error):
            if "dglkge.cli.launch" in process.cmdline():
                return process
    raise RuntimeError(f"no launcher runs on {host.name}")
