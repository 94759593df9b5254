"""A node of a job without SSH: connects to the first node's launcher, and is the node program of its machine.

It ends with the exit status of the job. When the launcher is lost it ends its processes, and then with status
255.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from dglkge.distributed.ip_config import read_ip_config
from dglkge.errors import NotReadyError
from dglkge.launch.machine import local_interfaces
from dglkge.launch.node_place import NodePlace, node_place
from dglkge.launch.node_program import NodeProgram
from dglkge.launch.protocol import HEARTBEAT_TIMEOUT_SECONDS, LOST_STATUS
from dglkge.launch.remote.handshake import HANDSHAKE_SECONDS, Peer, RefusedError, introduce_node, read_secret
from dglkge.launch.ssh import NOT_INHERITED, forwarded_environment

RETRY_SECONDS = 1.0


def place_of_this_node(options: argparse.Namespace, ip_config: Path) -> NodePlace | None:
    """Return this node's place from the launcher's options and this process's environment.

    Raises
    ------
    InputError
        If they contradict each other, or one is missing.
    """
    return node_place(
        options.node_rank,
        options.nodes,
        options.rendezvous,
        options.address,
        lambda: read_ip_config(ip_config),
        options.has_ip_config,
        os.environ,
        local_interfaces(),
    )


def run_node(
    place: NodePlace, secret_file: str | None, python: str, seconds: float, report: Callable[[str], None]
) -> int:
    """Take part in a job as a node other than the first, with this process's environment.

    Parameters
    ----------
    place : NodePlace
    secret_file : str or None
        None: the secret is in the environment.
    python : str
        This node's interpreter.
    seconds : float
        Timeout for the first connection to the launcher.
    report : callable
        Takes messages for the user.

    Returns
    -------
    int
        Exit status of the job.

    Raises
    ------
    DglkgeError
        See :func:`connect`.
    """
    secret = read_secret(secret_file, os.environ)
    for name in NOT_INHERITED:
        os.environ.pop(name, None)
    # Processes run in another folder: relative search paths become absolute.
    os.environ.update(forwarded_environment(os.environ))
    connection, received = connect(place, secret, seconds, report)
    where = f"{place.host}:{place.port}"
    greeting = f"node {place.rank} of {place.num_nodes}: connected to {where}"
    requests, replies = os.dup(connection.fileno()), os.dup(connection.fileno())
    program = NodeProgram(requests, replies, HEARTBEAT_TIMEOUT_SECONDS, python, received, report, greeting)
    status, reason = asyncio.run(program.run())
    if program.was_told_the_end:
        if reason:
            report(f"the job has ended: {reason}")
    elif status == LOST_STATUS:
        report(f"the launcher at {where} is lost: {reason}; this node's part ends")
    return status


def connect(
    place: NodePlace, secret: bytes, seconds: float, report: Callable[[str], None]
) -> tuple[socket.socket, bytes]:
    """Connect to the launcher, which may start later than this node.

    Parameters
    ----------
    place : NodePlace
    secret : bytes
    seconds : float
        Timeout.
    report : callable
        Takes messages for the user.

    Returns
    -------
    connection : socket.socket
        Authenticated.
    received : bytes
        What was read from it after the handshake.

    Raises
    ------
    NotReadyError
        If the launcher does not listen in time.
    RefusedError
        If it refuses this node.
    """
    where = f"{place.host}:{place.port}"
    deadline = time.monotonic() + seconds
    has_told = False
    while True:
        try:
            return _connect_once(place, secret)
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise NotReadyError(
                    f"no launcher of node 0 at {where} within {seconds:g} s (--rendezvous_seconds)"
                    f": {error.strerror or error}"
                ) from None
            if not has_told:
                report(f"waiting for node 0 at {where}: {error.strerror or error}")
                has_told = True
        time.sleep(RETRY_SECONDS)


def _connect_once(place: NodePlace, secret: bytes) -> tuple[socket.socket, bytes]:
    """Connect to the launcher once and authenticate; raises OSError if it cannot be reached."""
    connection = socket.create_connection((place.host, place.port), HANDSHAKE_SECONDS)
    try:
        address = place.address or str(connection.getsockname()[0])
        if ":" in address:
            raise RefusedError(
                f"this node reaches it from the IPv6 address {address}, and DGL's sockets are IPv4 only: "
                "give this machine's IPv4 address with --address"
            )
        hello = {
            "rank": place.rank,
            "nodes": place.num_nodes,
            "address": address,
            "variables": sorted(os.environ),
        }
        peer = Peer(connection)
        introduce_node(peer, secret, hello)
        connection.settimeout(None)
        return connection, peer.received
    except RefusedError as error:
        connection.close()
        where = f"{place.host}:{place.port}"
        raise RefusedError(f"node 0 at {where} refuses node {place.rank}: {error}") from None
    except BaseException:
        connection.close()
        raise
