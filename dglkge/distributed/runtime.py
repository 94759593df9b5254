"""How a process joins the cluster and leaves it: DGL's servers and torch's process group."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np
import torch
import torch.distributed as dist

from dglkge.distributed import dgl_compat
from dglkge.distributed.ip_config import read_ip_config
from dglkge.distributed.preemption import StopRequest
from dglkge.distributed.process_group import end_process_group, start_process_group
from dglkge.distributed.request_limit import limit_farewell, limited_requests, set_request_limit
from dglkge.distributed.server_loop import is_own_address
from dglkge.distributed.server_ports import wait_until_listening
from dglkge.distributed.world import World
from dglkge.errors import InputError

logger = logging.getLogger(__name__)

RENDEZVOUS_WAIT_SECONDS = 60
"""How long to wait for a rank 0 on this machine to listen before torch's own attempts begin."""

SERVER_WAIT_SECONDS = 60
"""How long to wait for this machine's servers to listen before DGL's own, slower attempts begin."""


@dataclass(frozen=True)
class Cluster:
    """A running job as one trainer sees it.

    Attributes
    ----------
    world : World
        Who this trainer is.
    graph : dgl.distributed.DistGraph
        The partitioned graph, held by the servers.
    stop : StopRequest
        Whether this trainer was asked to stop.
    """

    world: World
    graph: Any
    stop: StopRequest = field(default_factory=StopRequest)
    _farewells: list[Callable[[], None]] = field(default_factory=list)
    _releases: list[Callable[[], None]] = field(default_factory=list)

    def when_left(self, farewell: Callable[[], None]) -> None:
        """Call a function when this trainer's work is done and before it leaves; not after a failure."""
        self._farewells.append(farewell)

    def leave(self) -> None:
        """Do what is still to be done before this trainer leaves."""
        while self._farewells:  # none is kept: it may hold the cluster, and tables that must go now
            self._farewells.pop(0)()

    def when_gone(self, release: Callable[[], None]) -> None:
        """Call a function when this trainer ends, in good order or not, to give back what it holds."""
        self._releases.append(release)

    def let_go(self) -> None:
        """Give back what others wait for; the last that a trainer does, however it ends."""
        while self._releases:  # the last first: what was taken early may be needed until the end
            self._releases.pop()()

    def barrier(self) -> None:
        """Wait until every trainer has come here."""
        if dist.is_initialized():
            dist.barrier()

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of an array over all trainers; every trainer must call it with the same shape."""
        total = values.copy()
        if dist.is_initialized():
            dist.all_reduce(torch.from_numpy(total))
        return total

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all trainers by rank; every trainer must call it. It has torch's time limit."""
        if not dist.is_initialized():
            return [text]
        data = text.encode()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(lengths, torch.tensor([len(data)]))
        longest = max(int(length) for length in lengths)
        if longest == 0:
            return [""] * len(lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        found = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
        dist.all_gather(found, mine)
        return [each[: int(length)].numpy().tobytes().decode() for each, length in zip(found, lengths)]

    def must_stop(self) -> bool:
        """Tell whether any trainer was asked to stop: the same answer on all of them, which all call it."""
        return bool(self.sum(np.array([self.stop.is_noted], dtype=np.int64))[0])


def is_server() -> bool:
    """Tell whether the launcher started this process as a server."""
    return os.environ.get("DGL_ROLE", "client") == "server"


def num_servers() -> int:
    """Return how many servers each machine of a launched job has."""
    return int(os.environ.get("DGL_NUM_SERVER", "1"))


@contextlib.contextmanager
def join_cluster(graph_name: str, part_config: str, num_parts: int) -> Iterator[Cluster]:
    """Join the job that the launcher started; alone, train in DGL's standalone mode.

    In a server process this serves until the trainers have left and then ends the process. A trainer
    that fails inside the block ends at once: DGL would wait for ever for the others to leave with it.
    Inside the block SIGTERM and SIGINT are only noted, see :meth:`Cluster.must_stop`.

    Parameters
    ----------
    graph_name : str
        Name under which the graph was partitioned.
    part_config : str
        Path of DGL's partition file.
    num_parts : int
        Number of partitions in it.

    Yields
    ------
    Cluster

    Raises
    ------
    InputError
        If the number of partitions is not the number of machines.
    """
    ip_config = os.environ.get("DGL_IP_CONFIG", "ip_config.txt")
    if is_server():
        # Servers only: what stands in a trainer's environment goes on to all that it starts.
        os.environ.setdefault("DGL_CONF_PATH", part_config)
        dgl_compat.serve(ip_config)
    world = World.detect()
    _check_parts(num_parts, world)
    releases: list[Callable[[], None]] = []
    try:
        cluster = _start(world, ip_config, graph_name, part_config)
        releases.append(cluster.let_go)
        with cluster.stop.listening():  # after DGL, which takes SIGINT for itself
            yield cluster
            cluster.leave()
        cluster.let_go()
    except BaseException as error:
        for release in releases:
            release()
        if not world.launched:
            raise
        _fail(error, world)
    if dist.is_initialized():
        end_process_group()


def _start(world: World, ip_config: str, graph_name: str, part_config: str) -> Cluster:
    """Connect to the servers, then to the other trainers."""
    if not world.launched:
        dgl_compat.connect(ip_config)
        return Cluster(world, dgl_compat.open_graph(graph_name, part_config))
    machine = read_ip_config(ip_config)[world.machine]
    wait_until_listening(range(machine.port, machine.port + num_servers()), SERVER_WAIT_SECONDS)
    dgl_compat.connect(ip_config)  # has a limit of its own; from here on all trainers are there
    set_request_limit(world.limit_seconds)
    limit_farewell()
    _wait_for_rendezvous(world)
    start_process_group(world.rendezvous, world.rank, world.world_size, world.limit_seconds)
    with limited_requests():
        return Cluster(world, dgl_compat.open_graph(graph_name, part_config))


def _wait_for_rendezvous(world: World) -> None:
    """Wait until rank 0 listens; torch's own attempts lie most of a second apart."""
    address, port = world.rendezvous
    if world.rank > 0 and is_own_address(address):
        wait_until_listening([port], RENDEZVOUS_WAIT_SECONDS)


def _check_parts(num_parts: int, world: World) -> None:
    """Refuse a data set that was cut for another number of machines."""
    if num_parts == world.num_machines:
        return
    if not world.launched:
        raise InputError(
            f"the data set has {num_parts} partitions, and one process alone trains one: "
            "partition it with --num-parts 1, or start it with dglkge-launch"
        )
    raise InputError(
        f"the data set has {num_parts} partitions and ip_config.txt has {world.num_machines} machines; "
        "each machine holds one partition"
    )


def _fail(error: BaseException, world: World) -> None:
    """Say what went wrong and end this process without DGL's farewell, which waits for every trainer."""
    if isinstance(error, InputError):
        status = 2
        if world.rank == 0:
            sys.stderr.write(f"dglkge: error: {error}\n")
    elif isinstance(error, KeyboardInterrupt):
        status = 130
    elif isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    else:
        status = 1
        traceback.print_exception(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
