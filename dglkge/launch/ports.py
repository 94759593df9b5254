"""Ports of a job: chosen and checked by binding them."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from collections.abc import Collection

import psutil

from dglkge.distributed.addresses import HIGHEST_PORT
from dglkge.errors import InputError, NotReadyError

FIRST_MASTER_PORT = 29500
"""torch's usual rendezvous port, the first of those tried. All of them lie below the kernel's range of
ports for outgoing connections (from 32768), of which DGL's clients open many before torch binds this one."""

PORT_TRIES = 500


def check_server_ports(address: str, first_port: int, num_servers: int) -> None:
    """Check every port of a machine's servers by binding it; the error names the process that uses one."""
    if first_port + num_servers - 1 > HIGHEST_PORT:
        where = f"{num_servers} servers from port {first_port} on"
        raise InputError(f"{where} pass the highest port, {HIGHEST_PORT}")
    for port in range(first_port, first_port + num_servers):
        # A list of listeners would miss sockets of other users and containers: only binding is certain.
        error = bind_error(address, port)
        if error == errno.EADDRINUSE:
            words = f"port {port} on {address} is in use by {describe_listener(port)}"
            raise NotReadyError(f"{words}; end it or give another port in ip_config.txt")
        if error == errno.EACCES:
            raise InputError(f"port {port} on {address} may only be used by root; give a port above 1023")
        if error:
            raise NotReadyError(f"cannot listen on {address}:{port}: {os.strerror(error)}")


def find_master_port(address: str, avoid: Collection[int]) -> int:
    """Return a free port for torch's rendezvous, from 29500 to 29999; NotReadyError if none is free."""
    # Bound on all addresses: torch's own rendezvous, which scripts of other projects use, listens on all.
    return free_ports("", FIRST_MASTER_PORT, 1, avoid, f"free port {{}} on {address} for torch's rendezvous")


def free_ports(address: str, lowest: int, num_ports: int, avoid: Collection[int], words: str) -> int:
    """Return the first of some free ports in a row; `words` of the error leave out the range."""
    # From a random one on: jobs that start together should not try the same ports; torch binds its own only
    # seconds later. Those in containers with one network do not see each other's choice, and a trainer would
    # join the other job's server.
    start = random.SystemRandom().randrange(PORT_TRIES)
    for offset in range(PORT_TRIES):
        first = lowest + (start + offset) % PORT_TRIES
        if not any(port in avoid or bind_error(address, port) for port in range(first, first + num_ports)):
            return first
    raise NotReadyError("no " + words.format(f"from {lowest} to {lowest + PORT_TRIES - 1}"))


def bind_error(address: str, port: int) -> int:
    """Bind and listen as DGL's servers do; return the error number, 0 for a free port."""
    try:
        # With SO_REUSEADDR, as DGL: accepts a port whose last connections are still in TIME_WAIT.
        socket.create_server((address, port), backlog=1).close()
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


def describe_listener(port: int) -> str:
    """Describe the process that listens on a port, ``pid 12: command``, as far as this user may see it."""
    with contextlib.suppress(psutil.Error):
        # Without privileges the list has no pids of other users' processes.
        for connection in psutil.net_connections("tcp"):
            is_listener = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if is_listener and connection.pid is not None:
                return f"pid {connection.pid}: {' '.join(psutil.Process(connection.pid).cmdline())[:200]}"
    return "another process (its owner alone may see which)"
