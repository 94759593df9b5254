"""Which machine of ip_config.txt is this one."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence

import psutil

from dglkge.distributed.ip_config import Machine
from dglkge.errors import InputError, NotReadyError
from dglkge.launch.process_plan import Host


def local_interfaces() -> dict[str, str]:
    """Return this machine's IPv4 addresses and the network interface of each."""
    return {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def locate_hosts(machines: Sequence[Machine], interfaces: Mapping[str, str], num_cores: int) -> list[Host]:
    """Find the machines of a job that runs on this machine alone.

    Parameters
    ----------
    machines : sequence of Machine
        The lines of ip_config.txt; their addresses are this machine's.
    interfaces : mapping of str to str
        Addresses of this machine and their interfaces; all of 127.0.0.0/8 belongs to it besides.
    num_cores : int
        Cores of this machine.

    Returns
    -------
    list of Host
        One host.

    Raises
    ------
    InputError
        If a name has no IPv4 address, or if there are several.
    """
    resolved = [resolve(machine.address) for machine in machines]
    if len(machines) > 1:
        raise InputError(
            f"ip_config names this machine {len(machines)} times ({', '.join(resolved)}): the shared memory "
            "of two DGL machines on one host would collide; give one line and partition into one part"
        )
    loopback = interfaces.get("127.0.0.1", "lo")
    return [
        Host(address, machine.port, num_cores, interfaces.get(address, loopback))
        for address, machine in zip(resolved, machines)
    ]


def are_all_local(machines: Sequence[Machine], interfaces: Mapping[str, str]) -> bool:
    """Whether every machine is this one, so that no SSH is needed.

    Raises
    ------
    InputError
        If a name has no IPv4 address.
    """
    return all(is_local(resolve(machine.address), interfaces) for machine in machines)


def is_local(address: str, interfaces: Mapping[str, str]) -> bool:
    """Whether an IPv4 address is this machine's own."""
    return address in interfaces or ipaddress.IPv4Address(address).is_loopback


def resolve(address: str) -> str:
    """Return the IPv4 address of a host name (DGL's sockets take only numbers).

    Raises
    ------
    NotReadyError
        If the name has no IPv4 address.
    """
    try:
        found = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise NotReadyError(f"no IPv4 address for host {address!r} of ip_config: {error.strerror}") from None
    return str(found[0][4][0])
