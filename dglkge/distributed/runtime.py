"""Joins a process to its job and leaves it: DGL's servers, torch's process group, standalone mode."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from dglkge.distributed import addresses, dgl_compat
from dglkge.distributed.preemption import StopRequest
from dglkge.distributed.process_group import Result, agree, end_process_group, start_process_group
from dglkge.distributed.world import JSON, NO_VERIFY_VARIABLE, JsonFormatter, World, inherited_log_format
from dglkge.errors import InputError, JobError, exit_status_of
from dglkge.optim.alltoall import Alltoall

logger = logging.getLogger(__name__)

RENDEZVOUS_WAIT_SECONDS = 60
"""Time for a rank 0 on this machine to listen; after it torch's own attempts begin, almost 1 s apart."""

SERVER_WAIT_SECONDS = 60
"""Time for this machine's servers to listen; after it DGL's own attempts begin, 3 s apart."""

SAME_ERROR_SECONDS = 5.0
"""Time that ranks above 0 wait before they report bad input, as rank 0 usually reports the same. Longer than
the launcher's 3 s from SIGTERM to SIGKILL: SIGTERM is ignored once the training is over."""

SLOWEST_DISK_BYTES_PER_SECOND = 10e6
"""Read rate that timeouts of barriers allow for; a shared disk of spinning platters is faster."""

_MEMBERSHIP = threading.Lock()
"""Held while this process is in a job: DGL keeps its connections and tables in module variables. In a
launched job it is never released, because DGL's servers end when the trainers have left."""


@dataclass(frozen=True)
class Cluster:
    """A running job as one trainer sees it.

    Attributes
    ----------
    world : World
    graph : dgl.distributed.DistGraph
        The partitioned graph, held by the servers.
    stop : StopRequest
        Signals that request a stop of this trainer.
    """

    world: World
    graph: Any
    stop: StopRequest = field(default_factory=StopRequest)
    _leave_callbacks: list[Callable[[], None]] = field(default_factory=list)
    _exit_callbacks: list[Callable[[], None]] = field(default_factory=list)

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Register a function that is called once this trainer's work is done; not after a failure.

        The first registered is called first, and all ranks are still connected then.
        """
        self._leave_callbacks.append(callback)

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Register a function that is called however this trainer ends, after an exception too.

        The last registered is called first, as resources that were taken early may be needed until the end.
        Other ranks may be gone by then, so it must not communicate.
        """
        self._exit_callbacks.append(callback)

    def end(self) -> None:
        """Call the functions of :meth:`on_exit`. Their errors are logged and do not hide an earlier one."""
        while self._exit_callbacks:
            try:
                self._exit_callbacks.pop()()
            except Exception as error:
                logger.error("%s", error)

    def leave(self) -> None:
        """Call the functions of :meth:`on_leave`."""
        # Each is removed first: a reference that stays could keep tables alive through DGL's shutdown.
        while self._leave_callbacks:
            self._leave_callbacks.pop(0)()

    @contextlib.contextmanager
    def running(self) -> Iterator[Cluster]:
        """Record stop requests inside the block, and call the functions of both kinds after it.

        A launched process ignores the signals from then on, see :meth:`StopRequest.ignore_from_now_on`.
        """
        with self.stop.listening():  # after connect: DGL installs a SIGINT handler of its own
            try:
                yield self
                self.leave()
                if self.world.launched:
                    self.stop.ignore_from_now_on()
            finally:
                self.end()

    def barrier(self, num_bytes: int = 0) -> None:
        """Block until every trainer has reached the barrier.

        The timeout is longer by the time that a slow disk takes for `num_bytes`, which a trainer may have to
        read before it arrives; torch's message names missing ranks then.
        """
        if not dist.is_initialized():
            return
        if num_bytes:
            # dist.barrier has the timeout of the group; only monitored_barrier takes one of its own
            seconds = self.world.timeout_seconds + num_bytes / SLOWEST_DISK_BYTES_PER_SECOND
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=seconds))
        else:
            dist.barrier()

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of an array over all trainers; a collective, with equal shapes and dtypes."""
        total = values.copy()
        if dist.is_initialized():
            # from_numpy shares memory, so the sum is in the copy afterwards.
            dist.all_reduce(torch.from_numpy(total))
        return total

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all trainers in the order of ranks; a collective with the job's timeout."""
        return Alltoall(self.world.timeout_seconds, purpose="agreement", duty="take part in it").gather(text)

    def agree(self, work: Callable[[], Result], num_bytes: int = 0) -> Result:
        """Run a function on every trainer; if it fails on one, all raise its error. A collective.

        `num_bytes` are those that a trainer may have to read from a disk in it, as of :meth:`barrier`.
        """
        return agree(self.gather_texts, work, lambda: self.barrier(num_bytes) if num_bytes else None)

    def must_stop(self) -> bool:
        """Whether any trainer has a stop request; a collective that returns the same on all of them."""
        return bool(self.sum(np.array([self.stop.is_noted], dtype=np.int64))[0])


def is_server() -> bool:
    """Whether the launcher started this process as a server."""
    return os.environ.get("DGL_ROLE", "client") == "server"


def verifies_dataset() -> bool:
    """Whether this process compares the data set with its checksums, once on each machine.

    That is the first server of a machine, which the trainers wait for, or a process alone.
    ``DGLKGE_NO_VERIFY=1`` turns it off.
    """
    if os.environ.get(NO_VERIFY_VARIABLE) == "1":
        return False
    if is_server():
        return int(os.environ.get("DGL_SERVER_ID", "0")) % num_servers() == 0
    return not World.detect().launched


def use_log_format() -> None:
    """Let this process log as ``DGLKGE_LOG_FORMAT`` says: JSON lines, or unchanged."""
    if inherited_log_format() == JSON:
        role, number = ("server", "DGL_SERVER_ID") if is_server() else ("trainer", "RANK")
        formatter = JsonFormatter(f"{role} {os.environ.get(number, '0')}")
        for handler in logging.getLogger().handlers:  # a script has made them with logging.basicConfig
            handler.setFormatter(formatter)


def log_folder() -> str:
    """Return the folder of the job's logs on this machine; empty without a launcher."""
    return os.environ.get("DGLKGE_LOG_DIR", "")


def num_servers() -> int:
    """Return the number of servers on each machine of a launched job."""
    return int(os.environ.get("DGL_NUM_SERVER", "1"))


@contextlib.contextmanager
def join_cluster(graph_name: str, part_config: str, num_parts: int) -> Iterator[Cluster]:
    """Join the job that the launcher started; alone, train in DGL's standalone mode.

    A server process serves until the trainers have left, and then ends here. A trainer that fails inside the
    block ends at once: DGL's shutdown is a barrier without a timeout. Inside the block SIGTERM, SIGINT and
    SIGHUP are recorded, see :meth:`Cluster.must_stop`. After it a trainer ignores them, since the others wait
    for it in DGL's shutdown. In the standalone mode DGL's state in this process is reset whenever the block
    is left, and the process can join again.

    Raises
    ------
    InputError
        If the number of partitions is not the number of machines, or this process is in a job already, or
        was in one that was launched.
    """
    ip_config = os.environ.get("DGL_IP_CONFIG", "ip_config.txt")
    if is_server():
        # DGL's server reads the partition file's path from this variable. Set in servers only: children of a
        # trainer would inherit it.
        os.environ.setdefault("DGL_CONF_PATH", part_config)
        try:
            dgl_compat.serve(ip_config)
        except addresses.PortTakenError as error:
            _end_with_taken_port(error)
    world = World.detect()
    if num_parts != world.num_machines:
        words = f" and ip_config.txt has {world.num_machines} machines; each machine holds one partition"
        if not world.launched:
            words = ", and one process trains one: partition it with --num-parts 1, or use dglkge-launch"
        raise InputError(f"the data set has {num_parts} partitions{words}")
    if not world.launched:
        with _alone(world, ip_config, graph_name, part_config) as cluster:
            yield cluster
        return
    try:
        _become_member("a launched process trains once: start the next training as a job of its own")
        with _start(world, ip_config, graph_name, part_config).running() as cluster:
            yield cluster
    except BaseException as error:
        _fail(error, world)
    end_process_group()


@contextlib.contextmanager
def _alone(world: World, ip_config: str, graph_name: str, part_config: str) -> Iterator[Cluster]:
    """Join in DGL's standalone mode; the process can join again afterwards."""
    _become_member("it trains already: leave the block of the first join_cluster before, or use processes")
    try:
        dgl_compat.connect(ip_config)
        with Cluster(world, dgl_compat.open_graph(graph_name, part_config)).running() as cluster:
            yield cluster
    finally:
        dgl_compat.disconnect()
        _MEMBERSHIP.release()


def _become_member(reason: str) -> None:
    """Raise InputError if this process is in a job already."""
    if not _MEMBERSHIP.acquire(blocking=False):
        raise InputError(f"this process cannot join a second training: {reason}")


def _start(world: World, ip_config: str, graph_name: str, part_config: str) -> Cluster:
    """Connect to the servers, then to the other trainers."""
    # Own machine only: sockets of other machines are not in this kernel's table. DGL's own attempts find
    # those.
    machine = addresses.read_ip_config(ip_config)[world.machine]
    addresses.wait_until_listening(range(machine.port, machine.port + num_servers()), SERVER_WAIT_SECONDS)
    dgl_compat.set_request_timeout(world.timeout_seconds)
    # DGL's attempts to connect end after 51 minutes (1024 times 3 s); its wait for an answer never does.
    with dgl_compat.request_timeout():
        dgl_compat.connect(ip_config)
    dgl_compat.limit_shutdown()
    # Until rank 0 listens: torch's own attempts are almost a second apart.
    if world.rank > 0 and addresses.is_own_address(world.rendezvous[0]):
        addresses.wait_until_listening([world.rendezvous[1]], RENDEZVOUS_WAIT_SECONDS)
    start_process_group(world.rendezvous, world.rank, world.world_size, world.timeout_seconds)
    with dgl_compat.request_timeout():
        return Cluster(world, dgl_compat.open_graph(graph_name, part_config))


def _fail(error: BaseException, world: World) -> NoReturn:
    """Report an error and end this process without DGL's shutdown, which waits for every trainer.

    Bad input gives one line. Usually all ranks find it, so ranks above 0 wait first: if rank 0 has found it
    too, the launcher ends them meanwhile, and the line is not repeated for each of them.
    """
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        if isinstance(error, addresses.PortTakenError):
            _end_with_taken_port(error)
        if isinstance(error, (InputError, JobError)):
            if isinstance(error, InputError) and world.rank > 0:
                time.sleep(SAME_ERROR_SECONDS)
            sys.stderr.write(f"dglkge: error: {error}\n")
        elif not isinstance(error, (KeyboardInterrupt, SystemExit)):
            traceback.print_exception(error)
    _end_process(exit_status_of(error))


def _end_with_taken_port(error: addresses.PortTakenError) -> NoReturn:
    """Write the line on which the launcher starts the job again with other ports, and end this process."""
    sys.stderr.write(f"{addresses.PORT_TAKEN_MARK} {error.address}\n")
    _end_process(addresses.PORT_TAKEN_STATUS)


def _end_process(status: int) -> NoReturn:
    """Flush and exit without exit handlers, of which DGL's would block."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
