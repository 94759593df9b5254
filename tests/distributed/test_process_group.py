"""The process group: where its rendezvous listens; waits that have a limit end the process and say where."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dglkge.distributed.addresses import SOCKET_TABLES
from dglkge.distributed.process_group import end_process_group, start_process_group
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from tests import warm
from tests.surroundings import free_ports
from tests.toy_kg import REPOSITORY


def listeners(port: int) -> set[str]:
    lines = [line.split() for table in SOCKET_TABLES for line in table.read_text().splitlines()[1:]]
    local = [fields[1].partition(":") for fields in lines if fields[3] == "0A"]
    return {address for address, _, number in local if int(number, 16) == port}


def be_trainer(port: int, rank: int, results: multiprocessing.Queue) -> None:
    start_process_group(("127.0.0.1", port), rank, 2, 60.0)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    results.put((rank, int(total), listeners(port)))
    end_process_group()


def run_two_processes(target: Callable[..., None], *arguments: object) -> list[Any]:
    """Run a function as ranks 0 and 1 at a free port; return what the two put into a queue."""
    context, port = multiprocessing.get_context("fork"), free_ports()
    queue = context.Queue()
    processes = [context.Process(target=target, args=(port, rank, queue, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        results = [queue.get(timeout=60) for _ in processes]
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_two_trainers_meet_on_one_address() -> None:
    results = sorted(run_two_processes(be_trainer))
    assert results == [(rank, 3, {"0100007F"}) for rank in range(2)]  # 127.0.0.1, and neither 0.0.0.0 nor ::


def wait_for_a_reader(port: int, rank: int, results: multiprocessing.Queue, num_bytes: int) -> None:
    """Rank 1 reads for longer than a collective may take; report how the barrier ended."""
    start_process_group(("127.0.0.1", port), rank, 2, 1.0)
    if rank == 1:
        time.sleep(3)
    try:
        Cluster(World(timeout_seconds=1.0), None).barrier(num_bytes)
        results.put("together")
    except RuntimeError:
        results.put("alone")
    results.close()
    results.join_thread()
    os._exit(0)


@pytest.mark.parametrize(("num_bytes", "outcome"), [(0, "alone"), (10**9, "together")])
def test_a_barrier_allows_for_what_a_trainer_reads(num_bytes: int, outcome: str) -> None:
    """1 GB from a slow disk: 100 s more than the limit of 1 s."""
    assert run_two_processes(wait_for_a_reader, num_bytes) == [outcome] * 2


def test_a_process_that_cannot_leave_ends_and_says_where() -> None:
    """What torch 2.2 did, here made sure of: the end of the group never returns."""
    script = f"""
import time
import torch.distributed as dist
from dglkge.distributed import process_group
process_group.END_TIMEOUT_SECONDS = 1
dist.destroy_process_group = lambda: time.sleep(60)
process_group.start_process_group(("127.0.0.1", {free_ports()}), 0, 1, 20.0)
process_group.end_process_group()
"""
    done = subprocess.run([*warm.python(), "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Timeout (0:00:01)!" in done.stderr and "in end_process_group" in done.stderr


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(OSError, match="in use"):
            start_process_group(holder.getsockname(), 0, 1, 5.0)
    assert not dist.is_initialized()


SCRIPT = """
import atexit, ctypes, sys
from dglkge.distributed.dgl_compat import limit_shutdown, request_timeout, set_request_timeout
wait = ctypes.PyDLL(None).pause  # PyDLL keeps the lock, as DGL's requests do

def ask_server():
    with request_timeout():
        wait()

set_request_timeout(float(sys.argv[2]))
if sys.argv[1] == "request":
    ask_server()
elif sys.argv[1] == "shutdown":
    atexit.register(wait)
    limit_shutdown()
else:
    with request_timeout():
        print("answered")
    import time
    time.sleep(1.5 * float(sys.argv[2]))
    print("went on")
"""


@pytest.mark.parametrize(
    ("wait", "output"), [("request", ""), ("shutdown", ""), ("answered", "answered\nwent on\n")]
)
def test_a_wait_without_an_answer_ends_the_process_and_says_where(wait: str, output: str) -> None:
    command = [*warm.python(), "-c", SCRIPT, wait, "0.2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (0 if output else 1, output)
    assert ("Timeout (0:00:00.200000)!" in done.stderr) == (not output)
    assert ("in ask_server" in done.stderr) == (wait == "request")


CONNECT = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
with open("ip_config.txt", "w") as file:
    file.write(f"127.0.0.1 {port}\\n")
os.environ.update(
    DGL_DIST_MODE="distributed", DGL_ROLE="client", DGL_NUM_SAMPLER="0", DGL_NUM_SERVER="1", DGL_GROUP_ID="0",
    DGL_IP_CONFIG="ip_config.txt", DGL_CONF_PATH="toy.json", DGL_NUM_CLIENT="1", DGL_GRAPH_FORMAT="csc",
    RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_PORT="1",
    DGLKGE_TIMEOUT_SECONDS="2",
)
from dglkge.distributed.runtime import join_cluster
with join_cluster("toy", "toy.json", 1):
    pass
"""


def test_a_server_that_accepts_and_never_answers_ends_the_trainer(tmp_path: Path) -> None:
    """DGL's connection to the servers has the limit too."""
    command = [*warm.python(), "-c", CONNECT]
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert "Timeout (0:00:02)!" in done.stderr and "in connect" in done.stderr
