"""Servers and trainers as processes on machines that are one, for tests of what several machines do.

A machine is simulated by an address of its own on the loopback network (127.0.0.1, 127.0.0.2, ...) and by
names of its own for shared memory; everything else is DGL's ordinary code.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from unittest import mock

from tests import warm
from tests.surroundings import free_ports

_FORKS = multiprocessing.get_context("forkserver")


def forked(target: Callable[..., None], *arguments: object) -> multiprocessing.Process:
    """Return a process, not started yet, that is a copy of one which has imported torch and DGL.

    The imports take seconds. OpenMP reads its number of threads when it is loaded, which is there; with more
    than one in each process DGL's copies of rows take milliseconds.
    """
    _FORKS.set_forkserver_preload(["torch.distributed", "dglkge.training.trainer", "tests.optim.workers"])
    resource_tracker.ensure_running()  # with Python itself
    with mock.patch.object(spawn, "_python_exe", os.fsencode(warm.executable())):
        forkserver.ensure_running()
    return _FORKS.Process(target=target, args=arguments)


def _run(main: Callable[..., None], environment: Mapping[str, str], log: str, arguments: tuple) -> None:
    """Become a server or trainer, in a copy of the process that has imported everything."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    _be_on_machine(environment["TEST_ADDRESS"], environment["TEST_MACHINE"])
    status = 0
    try:
        main(*arguments)
    except SystemExit as end:
        status = end.code or 0
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # DGL's shutdown at exit would wait for the others
    atexit._run_exitfuncs()  # DGL's shutdown, which multiprocessing leaves out
    sys.stdout.flush()
    os._exit(status)


def _be_on_machine(address: str, name: str) -> None:
    """Make this process a machine's; launchers of other tests shall not take its memory for a job's."""
    import dgl.distributed.dist_graph as dist_graph
    import dgl.distributed.graph_partition_book as graph_partition_book
    import dgl.distributed.kvstore as kvstore
    import dgl.distributed.rpc_client as rpc_client

    rpc_client.local_ip4_addr_list = lambda: {address}
    real = kvstore.empty_shared_mem
    kvstore.empty_shared_mem = lambda shared, *rest: real(f"{name}{shared}~", *rest)
    for module in (dist_graph, graph_partition_book):
        module._get_ndata_path = lambda graph_name, shared: f"/{graph_name}_toynode_{shared}"


class SimulatedJob:
    """Processes with logs in a folder, which end with the block, as does their shared memory."""

    def __init__(self, folder: Path, num_machines: int, num_servers: int = 1) -> None:
        self.folder, self._tag = folder, "t" + uuid.uuid4().hex[:10]
        self._addresses = [f"127.0.0.{1 + machine}" for machine in range(num_machines)]
        port = free_ports(num_servers)
        (folder / "ip_config.txt").write_text("".join(f"{address} {port}\n" for address in self._addresses))
        self._processes: dict[tuple[str, int], multiprocessing.Process] = {}

    def __enter__(self) -> SimulatedJob:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()
        for segment in Path("/dev/shm").glob(f"*{self._tag}*"):
            segment.unlink(missing_ok=True)

    def machine(self, number: int) -> str:
        """Return the name of a machine, which begins those of its shared memory."""
        return f"{self._tag}m{number}"

    def start(
        self,
        main: Callable[..., None],
        role: str,
        number: int,
        machine: int,
        environment: Mapping[str, str],
        *arguments: object,
    ) -> None:
        """Start a ``server`` or trainer (``client``) that calls ``main(*arguments)``."""
        variables = {
            "DGL_DIST_MODE": "distributed",
            "DGL_NUM_SAMPLER": "0",
            "DGL_GROUP_ID": "0",
            "DGL_IP_CONFIG": str(self.folder / "ip_config.txt"),
            "DGL_GRAPH_FORMAT": "csc",
            "GLOO_SOCKET_IFNAME": "lo",
            "DGL_ROLE": role,
            "DGL_SERVER_ID": str(number),
            "RANK": str(number),
            "TEST_ADDRESS": self._addresses[machine],
            "TEST_MACHINE": self.machine(machine),
            **environment,
        }
        process = forked(_run, main, variables, str(self.folder / f"{role}{number}.log"), arguments)
        self._processes[role, number] = process
        process.start()

    def wait(
        self,
        seconds: float,
        statuses: Mapping[int, int | tuple[int, ...]] | None = None,
        servers: bool = True,
    ) -> None:
        """Wait for all; fail with their logs as soon as one has another status than 0 or that of its rank.

        Servers of trainers that were stopped stay: it is the launcher that ends those of a real job.
        """
        deadline, waiting = time.monotonic() + seconds, dict(self._processes)
        while any(role == "client" for role, _ in waiting) or (waiting and servers):
            for (role, number), process in list(waiting.items()):
                process.join(timeout=0.05)
                if process.exitcode is None:
                    continue
                del waiting[role, number]
                allowed = (statuses or {}).get(number, 0) if role == "client" else 0
                if process.exitcode not in (allowed if isinstance(allowed, tuple) else (allowed,)):
                    raise AssertionError(f"{role} {number} ended with {process.exitcode}\n{self._logs()}")
                servers &= role == "server" or process.exitcode == 0
            if time.monotonic() > deadline:
                raise AssertionError(f"{list(waiting)} did not end within {seconds} s\n{self._logs()}")

    def _logs(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in logs)
