"""How a process joins the cluster and leaves it: DGL's servers and torch's process group."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from dglkge.distributed import dgl_compat
from dglkge.distributed.ip_config import read_ip_config
from dglkge.distributed.preemption import StopRequest
from dglkge.distributed.process_group import end_process_group, start_process_group
from dglkge.distributed.request_limit import limit_farewell, limited_requests, set_request_limit
from dglkge.distributed.server_loop import is_own_address
from dglkge.distributed.server_ports import (
    PORT_TAKEN_MARK,
    PORT_TAKEN_STATUS,
    PortTakenError,
    wait_until_listening,
)
from dglkge.distributed.world import World
from dglkge.errors import InputError, JobError, exit_status_of

logger = logging.getLogger(__name__)

RENDEZVOUS_WAIT_SECONDS = 60
"""How long to wait for a rank 0 on this machine to listen before torch's own attempts begin."""

SERVER_WAIT_SECONDS = 60
"""How long to wait for this machine's servers to listen before DGL's own, slower attempts begin."""


_MEMBERSHIP = threading.Lock()
"""Held while this process is in a job: DGL keeps its connections and tables in global variables. In a
launched job it is never released, because DGL's servers end when the trainers have left."""

SLOWEST_DISK_BYTES_PER_SECOND = 10e6
"""Assumed in the limit of waits for a trainer that reads: a shared disk of spinning platters is faster."""


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
    _endings: list[Callable[[], None]] = field(default_factory=list)

    def when_left(self, farewell: Callable[[], None]) -> None:
        """Call a function when this trainer's work is done and before it leaves; not after a failure."""
        self._farewells.append(farewell)

    def when_ended(self, ending: Callable[[], None]) -> None:
        """Call a function however this trainer ends, by an exception too: for work of this process alone.

        The last is called first: what was taken early may be needed until the end.
        """
        self._endings.append(ending)

    def end(self) -> None:
        """Finish what was begun. What goes wrong is logged: it must not hide why the trainer ends."""
        while self._endings:
            try:
                self._endings.pop()()
            except Exception as error:
                logger.error("%s", error)

    def leave(self) -> None:
        """Do what is still to be done before this trainer leaves."""
        while self._farewells:  # none is kept: it may hold the cluster, and tables that must go now
            self._farewells.pop(0)()

    def barrier(self, num_bytes: int = 0) -> None:
        """Wait until every trainer has come here.

        Parameters
        ----------
        num_bytes : int
            What one of them may have to read from a disk before: the limit is longer by the time that a slow
            disk takes for it.
        """
        if not dist.is_initialized():
            return
        if num_bytes:
            limit = self.world.limit_seconds + num_bytes / SLOWEST_DISK_BYTES_PER_SECOND
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=limit))
        else:
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
    Inside the block SIGTERM, SIGINT and SIGHUP are only noted, see :meth:`Cluster.must_stop`; after it a
    trainer ignores them, since the others wait for it in DGL's shutdown.

    In the standalone mode all that DGL keeps in this process is forgotten when the block is left, in whatever
    way, and the process can join again.

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
        If the number of partitions is not the number of machines, or this process is in a job already, or
        was in one that was launched.
    """
    ip_config = os.environ.get("DGL_IP_CONFIG", "ip_config.txt")
    if is_server():
        # Servers only: what stands in a trainer's environment goes on to all that it starts.
        os.environ.setdefault("DGL_CONF_PATH", part_config)
        try:
            dgl_compat.serve(ip_config)
        except PortTakenError as error:
            _end_process(_report_taken_port(error))
    world = World.detect()
    _check_parts(num_parts, world)
    if not world.launched:
        with _alone(world, ip_config, graph_name, part_config) as cluster:
            yield cluster
        return
    try:
        _become_member("a launched process trains once: start the next training as a job of its own")
        cluster = _start(world, ip_config, graph_name, part_config)
        with cluster.stop.listening():  # after DGL, which takes SIGINT for itself
            try:
                yield cluster
                cluster.leave()
                cluster.stop.ignore_from_now_on()
            finally:
                cluster.end()
    except BaseException as error:
        _fail(error, world)
    end_process_group()


@contextlib.contextmanager
def _alone(world: World, ip_config: str, graph_name: str, part_config: str) -> Iterator[Cluster]:
    """Train in the standalone mode; whatever happens inside, the process can join again."""
    _become_member("it trains already: leave the block of the first join_cluster before, or use processes")
    try:
        dgl_compat.connect(ip_config)
        cluster = Cluster(world, dgl_compat.open_graph(graph_name, part_config))
        with cluster.stop.listening():
            try:
                yield cluster
                cluster.leave()
            finally:
                cluster.end()
    finally:
        dgl_compat.disconnect()
        _MEMBERSHIP.release()


def _become_member(reason: str) -> None:
    """Refuse to join where this process is in a job already."""
    if not _MEMBERSHIP.acquire(blocking=False):
        raise InputError(f"this process cannot join a second training: {reason}")


def _start(world: World, ip_config: str, graph_name: str, part_config: str) -> Cluster:
    """Connect to the servers, then to the other trainers."""
    machine = read_ip_config(ip_config)[world.machine]
    wait_until_listening(range(machine.port, machine.port + num_servers()), SERVER_WAIT_SECONDS)
    set_request_limit(world.limit_seconds)
    with limited_requests():  # DGL gives up after 51 minutes, or never where a server answers no more
        dgl_compat.connect(ip_config)
    limit_farewell()  # from here on all trainers are there
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
    with contextlib.suppress(OSError, ValueError):  # nobody may be left to read it
        if isinstance(error, PortTakenError):
            _end_process(_report_taken_port(error))
        if isinstance(error, (InputError, JobError)):
            # all ranks find the same bad input; what fails while the job runs may fail on one alone
            if world.rank == 0 or isinstance(error, JobError):
                sys.stderr.write(f"dglkge: error: {error}\n")
        elif not isinstance(error, (KeyboardInterrupt, SystemExit)):
            traceback.print_exception(type(error), error, error.__traceback__)
    _end_process(exit_status_of(error))


def _report_taken_port(error: PortTakenError) -> int:
    """Write the line by which the launcher knows that other ports will do; return the status."""
    sys.stderr.write(f"{PORT_TAKEN_MARK} {error.address}\n")
    return PORT_TAKEN_STATUS


def _end_process(status: int) -> NoReturn:
    """End at once, without exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
