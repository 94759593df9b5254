"""A DGL cluster on this machine for tests: servers and trainers as processes, several machines where wanted.

A machine is simulated by an address of its own on the loopback network (127.0.0.1, 127.0.0.2, ...) and by
names of its own for the servers' shared memory; everything else is DGL's ordinary code. Trainers are dealt
out to machines in turn, so that ranks are not in the order of machines.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests import warm
from tests.optim import cluster_process
from tests.surroundings import free_ports, made_once

REPOSITORY = Path(__file__).resolve().parents[2]

_FORKS = multiprocessing.get_context("forkserver")


def forked(target: Callable[..., None], *arguments: Any) -> multiprocessing.Process:
    """Return a process, not started yet, that is a copy of one which has imported torch and DGL.

    The imports take seconds. OpenMP reads its number of threads when it is loaded, which is there; with more
    than one in each process DGL's copies of rows take milliseconds.
    """
    imported = ["torch.distributed", "dglkge.training.build", "tests.optim.workers"]
    _FORKS.set_forkserver_preload([*imported, "tests.warm.numba_started"])
    resource_tracker.ensure_running()  # with Python itself
    with mock.patch.object(spawn, "_python_exe", os.fsencode(warm.executable())):
        forkserver.ensure_running()
    return _FORKS.Process(target=target, args=arguments)


_PARTITION_SCRIPT = """
import json, sys, torch, dglkge, dgl
folder, num_parts, counts = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
edges = {}
for ntype, num_nodes in counts.items():  # one edge more than nodes: DGL tells tables apart by their size
    heads = torch.arange(num_nodes + 1) % num_nodes
    edges[ntype, 'next_' + ntype, ntype] = (heads, (7 * heads + 1) % num_nodes)
graph = dgl.heterograph(edges, num_nodes_dict=counts)
torch.manual_seed(0)
maps, _ = dgl.distributed.partition_graph(graph, 'toy', num_parts, folder, part_method='random',
                                          return_mapping=True)
torch.save(maps, folder + '/original_ids.pt')
"""


@functools.cache
def partitions(num_parts: int, num_nodes: tuple[tuple[str, int], ...]) -> Path:
    """Folder of a partitioned toy graph, ``toy.json``; made once for all workers of a session."""

    def make(folder: Path) -> None:
        subprocess.run(
            [sys.executable, "-c", _PARTITION_SCRIPT, folder, str(num_parts), json.dumps(dict(num_nodes))],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=120,
        )

    counts = "-".join(f"{ntype}{count}" for ntype, count in num_nodes)
    return made_once(f"optim-{num_parts}-{counts}", make)


def original_ids(num_machines: int, num_nodes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Original id of each node id, by type, as :func:`run_cluster` partitions."""
    return torch.load(
        partitions(num_machines, tuple(num_nodes.items())) / "original_ids.pt", weights_only=True
    )


def run_cluster(
    worker: str,
    num_trainers: int,
    *,
    num_servers: int = 1,
    num_machines: int = 1,
    num_nodes: dict[str, int],
    arguments: Any = None,
    timeout_seconds: float = 150,
    expected_status: dict[int, int] | None = None,
) -> list[Any]:
    """Run ``worker(graph, arguments)`` in every trainer and return what each returned, by rank.

    Parameters
    ----------
    worker : str
        ``"module:function"``, importable from the repository.
    num_trainers, num_servers, num_machines : int
        Trainers in all, servers a machine, machines.
    expected_status : dict, optional
        Exit status of trainers that do not end with 0, by rank. Where it is given, also empty, the trainers
        leave without DGL's shutdown messages, and we end the servers.
    """
    with tempfile.TemporaryDirectory(prefix="optim_cluster_") as name:
        folder = Path(name)
        tag = "t" + uuid.uuid4().hex[:10]
        source = partitions(num_machines, tuple(num_nodes.items()))
        for part in range(num_machines):
            (folder / f"part{part}").symlink_to(source / f"part{part}")
        port = free_ports(num_servers)
        addresses = [f"127.0.0.{1 + machine}" for machine in range(num_machines)]
        (folder / "ip_config.txt").write_text("".join(f"{address} {port}\n" for address in addresses))
        torch.save(arguments, folder / "arguments.pt")
        processes = _start(folder, tag, source / "toy.json", worker, num_trainers, num_servers, addresses)
        try:
            return _finish(processes, folder, num_trainers, timeout_seconds, expected_status)
        finally:
            _kill(processes.values())
            for segment in Path("/dev/shm").glob(f"*{tag}*"):
                segment.unlink(missing_ok=True)


def _start(
    folder: Path,
    tag: str,
    config: Path,
    worker: str,
    num_trainers: int,
    num_servers: int,
    addresses: list[str],
) -> dict[tuple[str, int], multiprocessing.Process]:
    common = {
        "DGL_DIST_MODE": "distributed",
        "DGL_NUM_SAMPLER": "0",
        "DGL_NUM_CLIENT": str(num_trainers),
        "DGL_NUM_SERVER": str(num_servers),
        "DGL_GROUP_ID": "0",
        "DGL_IP_CONFIG": str(folder / "ip_config.txt"),
        "DGL_CONF_PATH": str(config),
        "DGL_GRAPH_FORMAT": "csc",
        "GLOO_SOCKET_IFNAME": "lo",
        "DGLBACKEND": "pytorch",
        "TEST_FOLDER": str(folder),
        "TEST_TAG": tag,
        "TEST_WORKER": worker,
        "WORLD_SIZE": str(num_trainers),
    }
    processes = {}

    def start(role: str, number: int, machine: int) -> None:
        env = {
            **common,
            "DGL_ROLE": role,
            "DGL_SERVER_ID": str(number),
            "RANK": str(number),
            "TEST_ADDRESS": addresses[machine],
            "TEST_MACHINE": str(machine),
        }
        log = str(folder / f"{role}{number}.log")
        process = forked(cluster_process.run, env, str(REPOSITORY), log)
        processes[role, number] = process
        process.start()

    for number in range(num_servers * len(addresses)):
        start("server", number, number // num_servers)
    for rank in range(num_trainers):
        start("client", rank, rank % len(addresses))
    return processes


def _finish(
    processes: dict,
    folder: Path,
    num_trainers: int,
    timeout_seconds: float,
    expected_status: dict[int, int] | None,
) -> list[Any]:
    """Wait for all processes, check every exit status, read the results."""
    deadline = time.monotonic() + timeout_seconds
    waiting = {
        (role, number): process
        for (role, number), process in processes.items()
        if role == "client" or expected_status is None
    }
    wanted = {("client", rank): status for rank, status in (expected_status or {}).items()}
    while waiting:
        for key, process in list(waiting.items()):
            process.join(timeout=0.05)
            if process.exitcode is None:
                continue
            del waiting[key]
            if process.exitcode != wanted.get(key, 0):
                raise AssertionError(f"{key} ended with {process.exitcode}\n{_logs(folder)}")
        if time.monotonic() > deadline:
            raise AssertionError(f"{list(waiting)} did not end within {timeout_seconds} s\n{_logs(folder)}")
    files = [folder / f"result{rank}.pt" for rank in range(num_trainers)]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def _logs(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log")))


def _kill(processes: Any) -> None:
    """End what is left, and reap it."""
    for process in processes:
        process.kill()
        process.join()
