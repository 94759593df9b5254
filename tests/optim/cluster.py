"""A DGL cluster of simulated machines for tests of the optimizers."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests import warm
from tests.simulated_machines import SimulatedJob
from tests.surroundings import made_once

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_NODES = {"item": 24, "user": 60}

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
def partitions(num_parts: int, num_nodes: tuple[tuple[str, int], ...] = tuple(NUM_NODES.items())) -> Path:
    """Folder of a partitioned toy graph, ``toy.json``; made once for all workers of a session."""

    def make(folder: Path) -> None:
        words = ["-c", _PARTITION_SCRIPT, folder, str(num_parts), json.dumps(dict(num_nodes))]
        subprocess.run([*warm.python(), *words], check=True, stdout=subprocess.DEVNULL, timeout=120)

    counts = "-".join(f"{ntype}{count}" for ntype, count in num_nodes)
    return made_once(f"optim-{num_parts}-{counts}", make)


def run_cluster(
    worker: str, num_trainers: int, *, num_servers=1, num_machines=1, arguments: Any = None,
    timeout_seconds=150, expected_status: dict[int, int] | None = None,
) -> list[Any]:  # fmt: skip
    """Run a function of ``workers`` in every trainer and return what each returned, by rank.

    Servers are those of a machine; trainers are dealt out to machines in turn. Where ``expected_status`` is
    given, also empty, trainers leave without DGL's shutdown messages, with status 0 or that of their rank.
    """
    with tempfile.TemporaryDirectory(prefix="optim_cluster_") as name:
        folder, source = Path(name), partitions(num_machines)
        for part in range(num_machines):
            (folder / f"part{part}").symlink_to(source / f"part{part}")
        torch.save(arguments, folder / "arguments.pt")
        env = {
            "DGL_NUM_CLIENT": str(num_trainers),
            "DGL_NUM_SERVER": str(num_servers),
            "DGL_CONF_PATH": str(source / "toy.json"),
            "DGLBACKEND": "pytorch",
            "TEST_FOLDER": str(folder),
            "WORLD_SIZE": str(num_trainers),
        }
        with SimulatedJob(folder, num_machines, num_servers) as job:
            for number in range(num_servers * num_machines):
                job.start(_join, "server", number, number // num_servers, env, worker)
            for rank in range(num_trainers):
                job.start(_join, "client", rank, rank % num_machines, env, worker)
            job.wait(timeout_seconds, expected_status, servers=expected_status is None)
        files = [folder / f"result{rank}.pt" for rank in range(num_trainers)]
        return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def _join(worker: str) -> None:
    """Join the cluster in the role that the environment gives, and run the worker."""
    import dgl
    import torch.distributed as dist

    from dglkge.distributed import dgl_compat

    env = os.environ
    os.chdir(REPOSITORY)
    folder, rank, name = Path(env["TEST_FOLDER"]), int(env["RANK"]), env["TEST_MACHINE"]
    config = folder / f"{name}.{env['DGL_ROLE']}{rank}.json"
    text = Path(env["DGL_CONF_PATH"]).read_text()
    config.write_text(text.replace('"graph_name": "toy"', f'"graph_name": "{name}"'))
    env["DGL_CONF_PATH"] = str(config)
    if env["DGL_ROLE"] == "server":
        dgl_compat.serve(env["DGL_IP_CONFIG"])
    dgl.distributed.initialize(env["DGL_IP_CONFIG"])
    world_size = int(env["WORLD_SIZE"])
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    if world_size > 1 or (isinstance(arguments, dict) and arguments.get("process_group")):
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    graph = dgl.distributed.DistGraph(name, part_config=str(config))
    workers = importlib.import_module("tests.optim.workers")
    torch.save(getattr(workers, worker)(graph, arguments), folder / f"result{rank}.pt")
