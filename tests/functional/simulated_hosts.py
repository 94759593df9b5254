"""A training job on simulated machines, with DGL's real servers, gloo and the training script."""

from __future__ import annotations

import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dglkge.data.dataset import Dataset
from dglkge.distributed import dgl_compat
from tests.functional.job import TRAIN
from tests.simulated_machines import SimulatedJob
from tests.surroundings import free_ports

CHECKED_TRAIN = str(Path(__file__).with_name("checked_train.py"))
_open_graph = dgl_compat.open_graph


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

    The folder is a fresh one, for logs. A trainer that does not end with one of the statuses is an error.
    """
    num_hosts = Dataset.open(dataset).num_parts
    num_trainers = num_hosts * trainers_per_host
    folder.mkdir(parents=True)
    arguments = [script, *(word for s in (f"dataset={dataset}", *settings) for word in ("--set", s))]
    common = {
        "DGL_NUM_CLIENT": str(num_trainers),
        "DGL_NUM_SERVER": "1",
        "WORLD_SIZE": str(num_trainers),
        "LOCAL_WORLD_SIZE": str(trainers_per_host),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)),
        "OMP_NUM_THREADS": "1",
    }
    with SimulatedJob(folder, num_hosts) as job:
        for host in range(num_hosts):
            env = {**common, "DGL_CONF_PATH": _describe_graph(folder, dataset, job.machine(host))}
            job.start(_run, "server", host, host, {**env, "LOCAL_RANK": "0"}, arguments)
            for local_rank in range(trainers_per_host):
                rank = host * trainers_per_host + local_rank
                job.start(_run, "client", rank, host, {**env, "LOCAL_RANK": str(local_rank)}, arguments)
        job.wait(timeout_seconds, dict.fromkeys(range(num_trainers), statuses))
    return [(folder / f"client{rank}.log").read_text(encoding="utf-8") for rank in range(num_trainers)]


def _describe_graph(folder: Path, dataset: Path, name: str) -> str:
    """Describe the graph to a host, under a name of its own; returns the file."""
    data = Dataset.open(dataset)
    for part in range(data.num_parts):
        link = folder / f"part{part}"
        if not link.exists():
            link.symlink_to(dataset / "partitions" / f"part{part}")
    text = data.graph_config_path.read_text(encoding="utf-8")
    config = folder / f"{name}.json"
    config.write_text(text.replace(f'"graph_name": "{data.graph_name}"', f'"graph_name": "{name}"'))
    return str(config)


def _run(arguments: list[str]) -> None:
    """Run the script, whose path comes first, as what the launcher would have started."""
    torch.set_num_threads(1)
    # Its default lock has a semaphore in /dev/shm, which a process that ends by os._exit leaves there.
    tqdm.set_lock(threading.RLock())
    dgl_compat.open_graph = _open_own_graph
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def _open_own_graph(graph_name: str, part_config: str) -> Any:
    """Open the graph under the name that it has on this host."""
    return _open_graph(os.environ["TEST_MACHINE"], part_config)
