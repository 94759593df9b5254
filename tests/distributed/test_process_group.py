"""The process group: where its rendezvous listens; waits that have a limit end the process and say where."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dglkge.data.dataset import Dataset
from dglkge.distributed.addresses import SOCKET_TABLES
from dglkge.distributed.dgl_compat import dgl
from dglkge.distributed.process_group import end_process_group, start_process_group
from dglkge.distributed.runtime import Cluster, join_cluster
from dglkge.distributed.world import World
from dglkge.errors import InputError
from tests import warm
from tests.surroundings import free_ports
from tests.toy_kg import REPOSITORY, toy_dataset


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
    script = f"""
import time, torch.distributed as dist
from dglkge.distributed import process_group
process_group.END_TIMEOUT_SECONDS = 1
dist.destroy_process_group = lambda: time.sleep(60)
process_group.start_process_group(("127.0.0.1", {free_ports()}), 0, 1, 20.0)
process_group.end_process_group()
"""
    done = subprocess.run([*warm.python(), "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Timeout (0:00:01)!" in done.stderr and "in end_process_group" in done.stderr


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
import os, socket
listener = socket.create_server(("127.0.0.1", 0))
with open("ip_config.txt", "w") as file:
    print("127.0.0.1", listener.getsockname()[1], file=file)
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
    command = [*warm.python(), "-c", CONNECT]
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert "Timeout (0:00:02)!" in done.stderr and "in connect" in done.stderr


def join():
    dataset = Dataset.open(toy_dataset())
    return join_cluster(dataset.graph_name, str(dataset.graph_config_path), dataset.num_parts)


def test_nothing_of_dgl_is_left() -> None:
    for _ in range(2):
        with join() as cluster:
            assert cluster.graph.num_nodes("entity") == 60
            assert dgl.distributed.kvstore.get_kvstore() is not None
        assert dgl.distributed.kvstore.get_kvstore() is None
        assert dgl.distributed.role.get_role() is None


def test_a_graph_that_cannot_be_opened_is_no_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a second one beside the first, which goes on."""
    with monkeypatch.context() as patched:
        patched.setattr(dgl.distributed, "DistGraph", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError), join():
            pass
    with join() as first:
        assert first.graph.num_nodes("entity") == 60
        with pytest.raises(InputError, match="^this process cannot join a second training"):
            with join():
                pass
        assert dgl.distributed.kvstore.get_kvstore() is first.graph._client


def test_what_runs_in_the_background_is_finished_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    finished = []
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="asked to fail"), join() as cluster:
        cluster.on_leave(lambda: finished.append("left"))
        cluster.on_exit(lambda: finished.append("ended"))
        cluster.on_exit(lambda: 1 / 0)
        raise ValueError("asked to fail")
    assert finished == ["ended"] and caplog.messages == ["division by zero"]


def test_a_process_group_of_the_user_stays() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with join():
        pass
    dist.destroy_process_group()  # fails if there is none
