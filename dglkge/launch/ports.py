"""TCP ports: tested by binding them, the only test that tells the truth."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Callable

import psutil

from dglkge.distributed.ip_config import HIGHEST_PORT
from dglkge.distributed.server_ports import PORT_TAKEN_MARK, PORT_TAKEN_STATUS
from dglkge.errors import InputError, NotReadyError
from dglkge.launch.job_result import JobResult

FIRST_MASTER_PORT = 29500
"""torch's usual rendezvous port. The search goes up from here and so stays below the range from which the
kernel takes ports for outgoing connections, of which DGL's clients open many before torch binds this one."""

MASTER_PORT_TRIES = 500

MOST_CHOICES = 5
"""How often an attempt is started with other ports before it counts as failed."""

LOG_END_BYTES = 4096


def with_ports_chosen_again(run: Callable[[], JobResult], say: Callable[[str], None]) -> JobResult:
    """Run an attempt of a job, and again where a port was taken between its choice and its use.

    Nothing has been trained then, so that this is no restart of the user's.

    Parameters
    ----------
    run : callable
        Chooses ports and runs the attempt.
    say : callable
        Takes messages for people.

    Returns
    -------
    JobResult
        Of the last run.
    """
    for _ in range(MOST_CHOICES - 1):
        result = run()
        address = None if result.is_interrupted else taken_port(result)
        if address is None:
            return result
        say(f"{address} was taken by another program before the job could listen there: choosing ports again")
    return run()


def taken_port(result: JobResult) -> str | None:
    """Return the address that a process of an ended attempt found taken, None if no process did."""
    for process in result.processes:
        if process.status != PORT_TAKEN_STATUS:
            continue
        try:
            end = Path(process.log).read_bytes()[-LOG_END_BYTES:].decode(errors="replace")
        except OSError:  # the logs' disk is full: nothing is known
            continue
        for line in end.splitlines():
            if line.startswith(PORT_TAKEN_MARK):
                return line[len(PORT_TAKEN_MARK) :].strip()
    return None


def check_server_ports(address: str, first_port: int, num_servers: int) -> None:
    """Bind every port that the servers of a machine will listen on.

    Raises
    ------
    InputError
        If a port is taken, forbidden or above 65535; the message names the port and who has it.
    """
    if first_port + num_servers - 1 > HIGHEST_PORT:
        raise InputError(
            f"{num_servers} servers from port {first_port} on pass the highest port, {HIGHEST_PORT}"
        )
    for port in range(first_port, first_port + num_servers):
        error = bind_error(address, port)
        if error == errno.EADDRINUSE:
            raise NotReadyError(
                f"port {port} on {address} is in use by {describe_holder(port)}; "
                "end it or give another port in ip_config.txt"
            )
        if error == errno.EACCES:
            raise InputError(f"port {port} on {address} may only be used by root; give a port above 1023")
        if error:
            raise NotReadyError(f"cannot listen on {address}:{port}: {os.strerror(error)}")


def find_master_port(address: str, avoid: Collection[int]) -> int:
    """Return a free port for torch's rendezvous.

    Raises
    ------
    InputError
        If no port near 29500 is free.
    """
    for port in range(FIRST_MASTER_PORT, FIRST_MASTER_PORT + MASTER_PORT_TRIES):
        # ours listens on one address; torch's own, which scripts of other projects use, listens on all
        if port not in avoid and not bind_error("", port):
            return port
    last = FIRST_MASTER_PORT + MASTER_PORT_TRIES - 1
    raise NotReadyError(
        f"no free port from {FIRST_MASTER_PORT} to {last} on {address} for torch's rendezvous"
    )


def bind_error(address: str, port: int) -> int:
    """Bind and listen, as DGL's servers do, and return the error number; 0 where the port is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # DGL sets this too: ports of connections that have just ended are no obstacle
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            return error.errno or errno.EINVAL
    return 0


def describe_holder(port: int) -> str:
    """Name the process that listens on a port, where this user may see it."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        connections = []
    for connection in connections:
        is_listener = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        if is_listener and connection.pid is not None:
            return describe_process(connection.pid)
    return "another process (its owner alone may see which)"


def describe_process(pid: int) -> str:
    """Return ``pid 12: command`` as far as this user may see it."""
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        command = ""
    return f"pid {pid}" + (f": {command[:200]}" if command else "")
