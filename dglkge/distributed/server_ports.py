"""Ports of a job's processes: wait until they listen, reserve a free one, report one that is in use.

DGL's clients sleep for 3 s between attempts to connect, so a job whose clients come first starts seconds
late. A probing connection would not help: DGL counts every connection as a client. Waiting reads the kernel's
table of listening sockets instead.
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

POLL_SECONDS, LONGEST_POLL_SECONDS = 0.02, 0.1

PORT_TAKEN_STATUS = 75
"""Exit status of a process that found its port in use before it trained anything (``EX_TEMPFAIL`` of
``sysexits.h``); the launcher starts the job again with other ports."""

PORT_TAKEN_MARK = "dglkge: port taken:"
"""Start of the last line of such a process, before the address. It distinguishes the process from a user's
script that ends with 75 for another reason."""


class PortTakenError(OSError):
    """A port that this process must listen on is in use by another program."""

    def __init__(self, address: str) -> None:
        super().__init__(errno.EADDRINUSE, f"{address} is in use by another program")
        self.address = address


def hold_usable_address(remote: str) -> tuple[str, socket.socket]:
    """Choose a free port on the address from which a machine is reached; return it and its socket.

    While the socket is open, the kernel gives the port to no other program. It does not listen and sets
    ``SO_REUSEADDR``, so DGL, which sets it too, can listen on the port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            # A UDP connect only makes the kernel choose the route, and so the local address.
            route.connect((remote, 1))  # sends nothing
            own = route.getsockname()[0]
        except OSError:
            own = "127.0.0.1"  # no route: a machine without a network, where the job runs alone
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Before SO_REUSEADDR is set: with it the kernel may choose a port that another such socket has bound.
    holder.bind((own, 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return f"{own}:{holder.getsockname()[1]}", holder


def listening_ports(tables: Collection[Path] = SOCKET_TABLES) -> set[int]:
    """Return the TCP ports on which a process of this machine listens; empty if the tables are absent."""
    ports = set()
    for table in tables:
        # The first line is a header. A kernel without IPv6 has no second table.
        lines = table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else []
        for line in lines:
            _, local_address, _, state, *_ = line.split()
            if state == LISTENING:
                ports.add(int(local_address.rpartition(":")[2], 16))
    return ports


def wait_until_listening(ports: Collection[int], timeout_seconds: float) -> bool:
    """Wait until all of the ports have a listener; False after the timeout.

    The caller connects all the same, and reports the error of the connection.
    """
    start = time.monotonic()
    end = start + timeout_seconds
    while not set(ports) <= listening_ports():
        now = time.monotonic()
        if now >= end:
            return False
        # The kernel walks all of its table for each look, which takes milliseconds on a large machine.
        time.sleep(min(max(POLL_SECONDS, (now - start) / 10), LONGEST_POLL_SECONDS))
    return True


def is_own_address(address: str) -> bool:
    """Whether an IPv4 address is one of this machine's, which alone can be bound."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
