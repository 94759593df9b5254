"""Place of this process among the nodes of a job without SSH, from options, ip_config.txt and a scheduler."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dglkge.distributed.ip_config import Machine
from dglkge.errors import InputError
from dglkge.launch.scheduler import SchedulerPlace, scheduler_place

DEFAULT_PORT = 29450
"""Below torch's rendezvous (29500 to 29999) and DGL's servers (30050 and up)."""

AUTO = "auto"


@dataclass(frozen=True)
class NodePlace:
    """This node's place in a job without SSH.

    Attributes
    ----------
    rank : int
        From 0; node 0 is the launcher.
    num_nodes : int
    host, port
        Of the rendezvous.
    address : str or None
        IPv4 address of this machine for DGL's and torch's traffic; None: the one that reaches the rendezvous.
    has_ip_config : bool
        Whether ip_config.txt names the machines.
    """

    rank: int
    num_nodes: int
    host: str
    port: int
    address: str | None = None
    has_ip_config: bool = False


def node_place(
    node_rank: str | None,
    num_nodes: int | None,
    rendezvous: str | None,
    address: str | None,
    ip_config: Callable[[], Sequence[Machine]],
    has_ip_config: bool,
    environment: Mapping[str, str],
    interfaces: Mapping[str, str],
) -> NodePlace | None:
    """Return this node's place; None for a job on one machine or over SSH.

    Parameters
    ----------
    node_rank : str or None
        ``--node_rank``: a number, or ``auto`` to read the scheduler's environment.
    num_nodes, rendezvous, address
        ``--nodes``, ``--rendezvous`` and ``--address``; they win over the scheduler's environment.
    ip_config : callable
        Reads ip_config.txt.
    has_ip_config : bool
        Whether ``--ip_config`` is among the options. The file then names the machines; it does also if
        neither ``--nodes`` nor the scheduler gives their number.
    environment : mapping of str to str
    interfaces : mapping of str to str
        This machine's IPv4 addresses, each with its interface: ``--address`` may name one.

    Raises
    ------
    InputError
        If the options contradict each other, or one is missing.
    """
    if node_rank is None:
        given = {"--nodes": num_nodes, "--rendezvous": rendezvous, "--address": address}
        alone = [name for name, value in given.items() if value is not None]
        if alone:
            raise InputError(f"{alone[0]} needs --node_rank K (or auto): it is for jobs without SSH")
        return None
    if num_nodes is not None and has_ip_config:
        raise InputError("--nodes and --ip_config exclude each other: the file's lines are the nodes")
    found = scheduler_place(environment) if node_rank == AUTO else SchedulerPlace(int(node_rank))
    count = num_nodes if num_nodes is not None or has_ip_config else found.num_nodes
    is_listed = count is None
    host, port = (None, DEFAULT_PORT) if rendezvous is None else host_and_port(rendezvous, DEFAULT_PORT)
    if count is None:
        machines = ip_config()
        count, host = len(machines), host or machines[0].address
        if address is not None:
            raise InputError("--address and ip_config.txt exclude each other: line K has node K's address")
    host = host or found.first_host
    if host is None:
        if count > 1:
            raise InputError("--nodes needs --rendezvous host:port, where the nodes reach node 0")
        host = "127.0.0.1"
    if found.rank >= count:
        raise InputError(f"--node_rank {found.rank} of {count} nodes; allowed are 0 to {count - 1}")
    if address is not None:
        address = _find_address(address, interfaces)
    return NodePlace(found.rank, count, host, port, address, is_listed)


def host_and_port(text: str, default_port: int) -> tuple[str, int]:
    """Read ``host[:port]``; an IPv6 address with a port is in brackets.

    Raises
    ------
    InputError
        If it has another form.

    Examples
    --------
    >>> host_and_port("node1:29460", 29450), host_and_port("[fd00::1]:5", 29450), host_and_port("fd00::1", 1)
    (('node1', 29460), ('fd00::1', 5), ('fd00::1', 1))
    """
    host, port = text, str(default_port)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = port if not rest else rest[1:] if rest.startswith(":") else ""
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not (host and port.isascii() and port.isdigit() and len(port) < 6 and 1 <= int(port) <= 65535):
        raise InputError(f"--rendezvous {text!r} is no host[:port]; an IPv6 address with a port: [fd00::1]:5")
    return host, int(port)


def _find_address(given: str, interfaces: Mapping[str, str]) -> str:
    """Return the IPv4 address for ``--address``, an address or the name of an interface."""
    found = [address for address, name in interfaces.items() if name == given]
    if len(found) > 1:
        raise InputError(f"--address {given} has {len(found)} IPv4 addresses; give one of {', '.join(found)}")
    if found:
        return found[0]
    try:
        parsed = ipaddress.IPv4Address(given)
    except ValueError:
        known = ", ".join(f"{name} {address}" for address, name in interfaces.items())
        raise InputError(
            f"--address {given!r} is neither an IPv4 address (DGL's sockets are IPv4 only) nor an interface "
            f"of this machine that has one; it has {known}"
        ) from None
    if parsed.is_unspecified or parsed.is_multicast or parsed.is_loopback:
        raise InputError(f"--address {given} is no address at which other machines reach this one")
    return given
