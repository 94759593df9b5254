"""One server or trainer of a test cluster; forked by ``cluster.run_cluster``."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import traceback
from pathlib import Path

import dgl
import dgl.distributed.dist_graph as dist_graph
import dgl.distributed.graph_partition_book as graph_partition_book
import dgl.distributed.kvstore as kvstore
import dgl.distributed.rpc_client as rpc_client
import torch
import torch.distributed as dist

from dglkge.distributed import dgl_compat


def be_on_machine(address: str, prefix: str) -> None:
    """Make this process a member of a simulated machine.

    Its shared memory has names that are not DGL's, so that launchers, which other tests start meanwhile on
    this machine, do not take it for a job.
    """
    rpc_client.local_ip4_addr_list = lambda: {address}
    real = kvstore.empty_shared_mem
    kvstore.empty_shared_mem = lambda name, *rest: real(prefix + name + "~", *rest)
    for module in (dist_graph, graph_partition_book):
        module._get_ndata_path = lambda graph_name, name: f"/{graph_name}_toynode_{name}"


def main() -> None:
    """Join the cluster in the role that the environment gives, and run the worker."""
    env = os.environ
    folder, rank = Path(env["TEST_FOLDER"]), int(env["RANK"])
    name = env["TEST_TAG"] + "m" + env["TEST_MACHINE"]
    be_on_machine(env["TEST_ADDRESS"], name)
    config = folder / f"{name}.{env['DGL_ROLE']}{rank}.json"
    config.write_text(
        Path(env["DGL_CONF_PATH"]).read_text().replace('"graph_name": "toy"', f'"graph_name": "{name}"')
    )
    env["DGL_CONF_PATH"] = str(config)
    if env["DGL_ROLE"] == "server":
        dgl_compat.serve(env["DGL_IP_CONFIG"])
    dgl.distributed.initialize(env["DGL_IP_CONFIG"])
    world_size = int(env["WORLD_SIZE"])
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    if world_size > 1 or (isinstance(arguments, dict) and arguments.get("process_group")):
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
    graph = dgl.distributed.DistGraph(name, part_config=str(config))
    module, function = env["TEST_WORKER"].split(":")
    result = getattr(importlib.import_module(module), function)(graph, arguments)
    torch.save(result, folder / f"result{rank}.pt")
    sys.stdout.flush()


def run(environment: dict[str, str], folder: str, log: str) -> None:
    """Become a server or trainer, in a copy of the process that has imported everything."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.chdir(folder)
    os.environ.update(environment)
    try:
        main()
        atexit._run_exitfuncs()  # DGL's shutdown, which multiprocessing leaves out
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # DGL's shutdown at exit would wait for the others
