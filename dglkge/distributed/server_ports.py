"""Ports of a job's processes: how to wait for them, to hold them, and to report that one was taken.

DGL's clients try to connect and, where nobody listens yet, sleep for seconds before they try again; a job
then starts several seconds later than it could. A probing connection is no way out: a server would count it
as a client. So the kernel's table of listening sockets is looked at instead.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Collection
from pathlib import Path

SOCKET_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENING = "0A"
"""State of a listening socket in the kernel's tables (Linux, ``include/net/tcp_states.h``)."""

POLL_SECONDS = 0.02

PORT_TAKEN_STATUS = 75
"""Exit status of a process that has trained nothing yet because its port was taken (``EX_TEMPFAIL`` of
``sysexits.h``); the launcher starts the job again with other ports."""

PORT_TAKEN_MARK = "dglkge: port taken:"
"""Begins the last line of such a process, before address and port: a user's script may end with 75 too."""


class PortTakenError(OSError):
    """Another program listens where this process has to.

    Parameters
    ----------
    address : str
        ``address:port``.
    """

    def __init__(self, address: str) -> None:
        super().__init__(errno.EADDRINUSE, f"{address} is in use by another program")
        self.address = address


def hold_usable_address(remote: str) -> tuple[str, socket.socket]:
    """Choose a free port of the address from which a machine is reached, and hold it.

    DGL's own function lets the port go before it is used, and any connection of any program may get it then.
    As long as the socket is open the kernel gives the port to no other program; it does not listen, so that
    DGL, which sets ``SO_REUSEADDR`` too, can.

    Parameters
    ----------
    remote : str
        IPv4 address of the machine.

    Returns
    -------
    address : str
        ``address:port``.
    holder : socket.socket
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect((remote, 1))  # sends nothing
            own = route.getsockname()[0]
        except OSError:
            own = "127.0.0.1"
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.bind((own, 0))  # a port that nobody has, not even with SO_REUSEADDR
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return f"{own}:{holder.getsockname()[1]}", holder


def listening_ports(tables: Collection[Path] = SOCKET_TABLES) -> set[int]:
    """Return the TCP ports on which a process of this machine listens; empty where the tables are absent."""
    ports = set()
    for table in tables:
        lines = table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else []
        for line in lines:
            _, local_address, _, state, *_ = line.split()
            if state == LISTENING:
                ports.add(int(local_address.rpartition(":")[2], 16))
    return ports


def wait_until_listening(ports: Collection[int], limit_seconds: float) -> bool:
    """Wait until somebody listens on all of the ports.

    Parameters
    ----------
    ports : collection of int
    limit_seconds : float

    Returns
    -------
    bool
        False where the limit has passed; DGL's own attempts then say more.
    """
    end = time.monotonic() + limit_seconds
    while not set(ports) <= listening_ports():
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_SECONDS)
    return True
