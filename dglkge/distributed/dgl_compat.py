"""All that differs between the supported versions of DGL, its server loop, and the noise that it makes.

DGL's clients try to connect and, where nobody listens yet, sleep for seconds before they try again; a job
then starts several seconds later than it could. A probing connection is no way out: a server would count it
as a client. So the kernel's table of listening sockets is looked at instead.

Before DGL's server (``rpc_server.py`` of 1.1.3 and 2.1.0) calls its clients back it sleeps, so that their
sockets listen by then. Here it looks whether they do: for clients of its own machine in the kernel's table,
for others it gives them a moment. Were one later still, DGL's own connection would try again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import re
import socket
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable
from unittest import mock

import dgl
import dgl.distributed

from dglkge.distributed.world import choose_dgl_backend

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


DGL_SLEEP_SECONDS = 3
"""What DGL sleeps once; its shorter sleeps, between attempts to connect, stay as they are."""

REMOTE_PAUSE_SECONDS = 0.5
"""For clients on other machines: between their greeting and their listening lie milliseconds."""

LISTEN_LIMIT_SECONDS = 10.0


@contextlib.contextmanager
def without_sleep(rpc_server: Any, pause: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Run DGL's server inside this block.

    Parameters
    ----------
    rpc_server : module
        ``dgl.distributed.rpc_server``; its clock and its ``rpc.connect_receiver`` are replaced.
    pause : callable
        Waits some seconds; for tests.
    """
    connect = rpc_server.rpc.connect_receiver
    pause_once = functools.cache(pause)

    def connect_when_listening(address: str, port: str, *identity: int) -> Any:
        if is_own_address(address):
            wait_until_listening([int(port)], LISTEN_LIMIT_SECONDS)
        else:
            pause_once(REMOTE_PAUSE_SECONDS)
        return connect(address, port, *identity)

    def sleep(seconds: float) -> None:
        if seconds < DGL_SLEEP_SECONDS:
            pause(seconds)

    with contextlib.ExitStack() as replaced:
        replaced.enter_context(mock.patch.object(rpc_server, "time", SimpleNamespace(sleep=sleep)))
        replaced.enter_context(mock.patch.object(rpc_server.rpc, "connect_receiver", connect_when_listening))
        yield


def is_own_address(address: str) -> bool:
    """Tell whether an IPv4 address is one of this machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


choose_dgl_backend()


logger = logging.getLogger(__name__)


def serve(ip_config: str) -> None:
    """Be a server until all clients have left, then end the process.

    Parameters
    ----------
    ip_config : str
        Path of the file of addresses.

    Raises
    ------
    PortTakenError
        If another program listens on the server's port.
    """
    with without_sleep(dgl.distributed.rpc_server), _taken_ports_named():
        dgl.distributed.initialize(ip_config)
    sys.exit(0)


def connect(ip_config: str) -> None:
    """Be a client of the servers.

    Parameters
    ----------
    ip_config : str
        Path of the file of addresses; not read in the standalone mode.

    Raises
    ------
    PortTakenError
        If another program listens on the port that this client has chosen.
    """

    def choose_and_hold(remote: str) -> str:
        address, holder = hold_usable_address(remote)
        stack.enter_context(holder)
        return address

    with contextlib.ExitStack() as stack:
        rpc_client = dgl.distributed.rpc_client
        stack.enter_context(mock.patch.object(rpc_client, "get_local_usable_addr", choose_and_hold))
        # DGL 2.1 prints a line about GraphBolt, which says nothing to the user.
        stack.enter_context(contextlib.redirect_stdout(_LogWriter()))
        stack.enter_context(_taken_ports_named())
        dgl.distributed.initialize(ip_config)


def open_graph(graph_name: str, part_config: str) -> Any:
    """Return the ``DistGraph`` of the partitions that the servers hold.

    Parameters
    ----------
    graph_name : str
        Name under which the graph was partitioned.
    part_config : str
        Path of DGL's partition file; read in the standalone mode only.
    """
    with contextlib.redirect_stdout(_LogWriter()):
        return dgl.distributed.DistGraph(graph_name, part_config=part_config)


@contextlib.contextmanager
def _taken_ports_named() -> Iterator[None]:
    """Turn DGL's error for a port that is taken, known by its text alone, into one of ours."""
    try:
        yield
    except dgl.DGLError as error:
        found = re.search(r"Cannot bind to (\S+)", str(error))
        if found is None:
            raise
        raise PortTakenError(found.group(1)) from error


def disconnect() -> None:
    """Forget what DGL keeps in this process for the standalone mode, so that :func:`connect` starts anew.

    DGL's own ``exit_client`` is for clients of servers. Tensors and embeddings that are still referenced keep
    the store that they were made in; nobody else can reach it.
    """
    dgl.distributed.kvstore.close_kvstore()
    role = dgl.distributed.role
    role.PER_ROLE_RANK, role.GLOBAL_RANK, role.CUR_ROLE, role.IS_STANDALONE = {}, {}, None, False
    dgl.distributed.dist_tensor.DIST_TENSOR_ID = 0  # numbers the tensors without a name


class _LogWriter:
    """A stream that passes whole lines on to the log."""

    def write(self, text: str) -> int:
        if text.strip():
            logger.debug(text.rstrip())
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""
