"""The place of this node in a job without SSH, as options or a scheduler's environment give it."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dglkge.distributed.addresses import Machine
from dglkge.errors import InputError

RENDEZVOUS_PORT = 29450
"""Below torch's rendezvous (29500 to 29999) and DGL's servers (30050 and up)."""

AUTO = "auto"


class NodePlace(NamedTuple):
    """This node's place in a job without SSH; node 0 is the launcher, host and port are of the rendezvous.

    `address` is the IPv4 address of this machine for DGL's and torch's traffic; None: the one that reaches
    the rendezvous. `has_ip_config`: ip_config.txt names the machines.
    """

    rank: int
    num_nodes: int
    host: str
    port: int
    address: str | None = None
    has_ip_config: bool = False


def node_place(
    options: argparse.Namespace,
    ip_config: Callable[[], Sequence[Machine]],
    interfaces: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
) -> NodePlace | None:
    """Return this node's place; None for a job on one machine or over SSH.

    Parameters
    ----------
    options : argparse.Namespace
        Of the launcher. ``--node_rank`` is a number, or ``auto`` to read the scheduler's environment, over
        which ``--nodes``, ``--rendezvous`` and ``--address`` win. If ``--ip_config`` is given
        (``has_ip_config``), the file names the machines; it does also if neither ``--nodes`` nor the
        scheduler gives their number.
    ip_config : callable
        Reads ip_config.txt.
    interfaces : mapping of str to str
        This machine's IPv4 addresses, each with its interface: ``--address`` may name one.
    environment : mapping of str to str

    Raises
    ------
    InputError
        If the options contradict each other, or one is missing.
    """
    num_nodes, address = options.nodes, options.address
    if options.node_rank is None:
        for name in ("nodes", "rendezvous", "address"):
            if getattr(options, name) is not None:
                raise InputError(f"--{name} needs --node_rank K (or auto): it is for jobs without SSH")
        return None
    if num_nodes is not None and options.has_ip_config:
        raise InputError("--nodes and --ip_config exclude each other: the file's lines are the nodes")
    rank, scheduled_nodes, first = options.node_rank, None, None
    if rank == AUTO:
        rank, scheduled_nodes, first = scheduler_place(environment)
    count = num_nodes if num_nodes is not None or options.has_ip_config else scheduled_nodes
    is_listed, host, port = count is None, None, RENDEZVOUS_PORT
    if options.rendezvous is not None:
        host, port = host_and_port(options.rendezvous, RENDEZVOUS_PORT)
    if count is None:
        machines = ip_config()
        count, host = len(machines), host or machines[0].address
        if address is not None:
            raise InputError("--address and ip_config.txt exclude each other: line K has node K's address")
    host = host or first
    if host is None:
        if count > 1:
            raise InputError("--nodes needs --rendezvous host:port, where the nodes reach node 0")
        host = "127.0.0.1"
    if int(rank) >= count:
        raise InputError(f"--node_rank {rank} of {count} nodes; allowed are 0 to {count - 1}")
    if address is not None:
        address = _find_address(address, interfaces)
    return NodePlace(int(rank), count, host, port, address, is_listed)


def host_and_port(text: str, default_port: int) -> tuple[str, int]:
    """Read ``host[:port]``; an IPv6 address with a port is in brackets. Raises InputError for other forms."""
    if text.count(":") > 1 and not text.startswith("["):
        return text, default_port
    match = re.fullmatch(r"(?:\[(.+)\]|([^:]+))(?::([0-9]{1,5}))?", text)
    port = int(match[3] or default_port) if match else 0
    if match is None or not 1 <= port <= 65535:
        raise InputError(f"--rendezvous {text!r} is no host[:port]; an IPv6 address with a port: [fd00::1]:5")
    return match[1] or match[2], port


def _find_address(text: str, interfaces: Mapping[str, str]) -> str:
    """Return the IPv4 address for ``--address``, an address or the name of an interface."""
    address, *more = [address for address, name in interfaces.items() if name == text] or [text]
    if more:
        several = ", ".join([address, *more])
        raise InputError(f"--address {text} has {len(more) + 1} IPv4 addresses; give one of {several}")
    try:
        parsed = ipaddress.IPv4Address(address)
    except ValueError:
        known = ", ".join(f"{name} {address}" for address, name in interfaces.items())
        raise InputError(
            f"--address {text!r} is neither an IPv4 address (DGL's sockets are IPv4 only) nor an interface "
            f"of this machine that has one; it has {known}"
        ) from None
    if parsed.is_unspecified or parsed.is_multicast or parsed.is_loopback:
        raise InputError(f"--address {text} is no address at which other machines reach this one")
    return address


class _Scheduler(NamedTuple):
    """Variables of a scheduler, of which the first that is set counts; how to start a process a node."""

    name: str
    rank: str
    local_rank: str = ""
    num_nodes: tuple[str, ...] = ()
    first_host: tuple[str, ...] = ()
    remedy: str = ""
    step: str = ""  # set if all nodes were started


SCHEDULERS = (
    _Scheduler("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_SIZE",),
               remedy="mpirun --map-by ppr:1:node"),
    _Scheduler("torchrun", "GROUP_RANK", "LOCAL_RANK", ("GROUP_WORLD_SIZE",), ("MASTER_ADDR",),
               "torchrun --nproc-per-node=1"),
    _Scheduler("Kubernetes", "JOB_COMPLETION_INDEX"),
    _Scheduler("SLURM", "SLURM_NODEID", "SLURM_LOCALID",
               ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
               ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "srun --ntasks-per-node=1",
               "SLURM_STEP_ID"),  # absent in the script of sbatch, which runs on the first node only
)  # fmt: skip
"""The first whose rank is set counts: ``mpirun`` and torchrun may run inside a job of SLURM."""


def scheduler_place(environment: Mapping[str, str]) -> tuple[int, int | None, str | None]:
    """Return this node's rank; the number of nodes and the name of node 0 as far as the scheduler gives them.

    Raises
    ------
    InputError
        If no scheduler has set its variables, one is no number, several processes run on one node, or this is
        the script of a batch job.
    """
    for scheduler in SCHEDULERS:
        if not environment.get(scheduler.rank):
            continue
        if (local := environment.get(scheduler.local_rank, "0")) != "0":
            raise InputError(
                f"{scheduler.local_rank} is {local}: {scheduler.name} has started several processes on this "
                "node; dglkge-launch starts the node's trainers itself, one process a node is enough "
                f"({scheduler.remedy})"
            )
        rank = _number(environment, scheduler.rank, 0)
        count = next(filter(environment.get, scheduler.num_nodes), "")
        hosts = [first_host(environment[name]) for name in scheduler.first_host if environment.get(name)]
        num_nodes = _number(environment, count, 1) if count else None
        if num_nodes is not None and rank >= num_nodes:
            raise InputError(f"{scheduler.rank} is {rank} and {count} is {num_nodes}; ranks count from 0")
        if scheduler.step and not environment.get(scheduler.step) and (num_nodes or 1) > 1:
            raise InputError(
                f"{scheduler.name} has started this process on one of {num_nodes} nodes only; start "
                f"dglkge-launch on each of them with {scheduler.remedy}"
            )
        return rank, num_nodes, next(iter(hosts), None)
    names = ", ".join(f"{scheduler.rank} ({scheduler.name})" for scheduler in reversed(SCHEDULERS))
    raise InputError(
        f"--node_rank auto: no scheduler has set this node's rank; expected one of {names}; or give a number"
    )


def first_host(node_list: str) -> str:
    """Return the first host of a list in SLURM's form: ``r1n3`` of ``r[1-2]n[3,5],r4``."""
    # Commas in brackets separate numbers, others hosts. A number may have leading zeros, which are kept.
    host = re.findall(r"(?:[^,\[]|\[[^\]]*\])*", node_list)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", host)


def _number(environment: Mapping[str, str], name: str, lowest: int) -> int:
    """Read a variable as a whole number."""
    text = environment[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) >= lowest):
        raise InputError(f"the variable {name} is {text!r}; expected a whole number of at least {lowest}")
    return int(text)
