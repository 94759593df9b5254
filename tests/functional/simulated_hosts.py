"""A training job on several hosts that are one: addresses and names of shared memory are each host's own.

Everything else is the real thing: DGL's servers, gloo, the training script. See ``tests.optim.cluster``,
which does the same for the optimizers alone.
"""

from __future__ import annotations

import time
import uuid
from multiprocessing.process import BaseProcess as Process
from pathlib import Path

from dglkge.data.dataset import Dataset
from tests.functional import host_process
from tests.functional.job import TRAIN
from tests.optim.cluster import forked
from tests.surroundings import free_ports

CHECKED_TRAIN = str(Path(__file__).with_name("checked_train.py"))


def train_on_hosts(
    folder: Path,
    dataset: Path,
    trainers_per_host: int,
    *settings: str,
    script: str = TRAIN,
    timeout_seconds: float = 240,
    statuses: tuple[int, ...] = (0,),
) -> list[str]:
    """Train on as many hosts as the data set has partitions; returns the output of each trainer, by rank.

    The folder is a fresh one, for logs. A process that does not end with one of the statuses is an error.
    """
    num_hosts = Dataset.open(dataset).num_parts
    tag, port = "t" + uuid.uuid4().hex[:10], free_ports(1)
    folder.mkdir(parents=True)
    addresses = [f"127.0.0.{1 + host}" for host in range(num_hosts)]
    (folder / "ip_config.txt").write_text("".join(f"{address} {port}\n" for address in addresses))
    arguments = [script, *(word for s in (f"dataset={dataset}", *settings) for word in ("--set", s))]
    num_trainers = num_hosts * trainers_per_host
    common = {
        "DGL_NUM_CLIENT": str(num_trainers),
        "WORLD_SIZE": str(num_trainers),
        "LOCAL_WORLD_SIZE": str(trainers_per_host),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)),
    }
    processes: dict[tuple[str, int], Process] = {}
    try:
        for host, address in enumerate(addresses):
            env = {**common, **_host(folder, dataset, f"{tag}h{host}", address)}
            processes["server", host] = _start(arguments, folder, env, "server", host, 0)
            for local_rank in range(trainers_per_host):
                rank = host * trainers_per_host + local_rank
                processes["client", rank] = _start(arguments, folder, env, "client", rank, local_rank)
        _wait(processes, folder, time.monotonic() + timeout_seconds, statuses)
    finally:
        for process in processes.values():
            process.kill()
            process.join()
        for segment in Path("/dev/shm").glob(f"*{tag}*"):
            segment.unlink(missing_ok=True)
    return [(folder / f"client{rank}.log").read_text(encoding="utf-8") for rank in range(num_trainers)]


def _host(folder: Path, dataset: Path, name: str, address: str) -> dict[str, str]:
    """Give a host its description of the graph, under a name of its own; returns its environment."""
    data = Dataset.open(dataset)
    for part in range(data.num_parts):
        link = folder / f"part{part}"
        if not link.exists():
            link.symlink_to(dataset / "partitions" / f"part{part}")
    text = data.graph_config_path.read_text(encoding="utf-8")
    config = folder / f"{name}.json"
    config.write_text(text.replace(f'"graph_name": "{data.graph_name}"', f'"graph_name": "{name}"'))
    return {
        "DGL_DIST_MODE": "distributed",
        "OMP_NUM_THREADS": "1",
        "DGL_NUM_SAMPLER": "0",
        "DGL_NUM_SERVER": "1",
        "DGL_GROUP_ID": "0",
        "DGL_IP_CONFIG": str(folder / "ip_config.txt"),
        "DGL_CONF_PATH": str(config),
        "DGL_GRAPH_FORMAT": "csc",
        "GLOO_SOCKET_IFNAME": "lo",
        "TEST_ADDRESS": address,
        "TEST_GRAPH_NAME": name,
    }


def _start(
    arguments: list[str], folder: Path, environment: dict[str, str], role: str, number: int, local_rank: int
) -> Process:
    """Start a process of the job."""
    own = {
        **environment,
        "DGL_ROLE": role,
        "DGL_SERVER_ID": str(number),
        "RANK": str(number),
        "LOCAL_RANK": str(local_rank),
    }
    log = str(folder / f"{role}{number}.log")
    process = forked(host_process.run, own, arguments, log)
    process.start()
    return process


def _wait(
    processes: dict[tuple[str, int], Process], folder: Path, deadline: float, statuses: tuple[int, ...]
) -> None:
    """Wait for all processes; fail with their logs as soon as one fails.

    Trainers that are stopped leave their servers running; it is the launcher that ends those of a real job.
    """
    waiting = dict(processes)
    while waiting:
        is_stopped = any(process.exitcode for (role, _), process in processes.items() if role == "client")
        if is_stopped and all(role == "server" for role, _ in waiting):
            return
        for key, process in list(waiting.items()):
            process.join(timeout=0.05)
            if process.exitcode is None:
                continue
            del waiting[key]
            if process.exitcode not in statuses:
                raise RuntimeError(f"{key} ended with {process.exitcode}\n{_logs(folder)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{list(waiting)} did not end in time\n{_logs(folder)}")


def _logs(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log")))
