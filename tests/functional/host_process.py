"""One server or trainer of a job on simulated hosts; forked by ``simulated_hosts.train_on_hosts``."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
import traceback
from typing import Any

import torch
from tqdm import tqdm

from dglkge.distributed import dgl_compat
from tests.optim.cluster_process import be_on_machine

open_graph = dgl_compat.open_graph


def open_own_graph(graph_name: str, part_config: str) -> Any:
    """Open the graph under the name that it has on this host."""
    return open_graph(os.environ["TEST_GRAPH_NAME"], part_config)


def run(environment: dict[str, str], arguments: list[str], log: str) -> None:
    """Become a server or trainer, in a copy of the process that has imported everything.

    ``environment`` is what the launcher would set, ``arguments`` the script's path and arguments.
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    # Its default lock has a semaphore in /dev/shm, which a process that ends by os._exit leaves there.
    tqdm.set_lock(threading.RLock())
    be_on_machine(os.environ["TEST_ADDRESS"], os.environ["TEST_GRAPH_NAME"])
    dgl_compat.open_graph = open_own_graph
    sys.argv = arguments
    status: Any = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # DGL's shutdown at exit would wait for the others
    atexit._run_exitfuncs()  # DGL's shutdown, which multiprocessing leaves out
    sys.stdout.flush()
    os._exit(status)
