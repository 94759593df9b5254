"""Waiting for this machine's servers without touching them.

DGL's clients try to connect and, where nobody listens yet, sleep for seconds before they try again; a job
then starts several seconds later than it could. A probing connection is no way out: a server would count it
as a client. So the kernel's table of listening sockets is looked at instead.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

SOCKET_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENING = "0A"
"""State of a listening socket in the kernel's tables (Linux, ``include/net/tcp_states.h``)."""

POLL_SECONDS = 0.02


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
