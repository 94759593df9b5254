"""A node of a job without SSH: connects to the first node's launcher, and is the node program of its machine.

It ends with the exit status of the job. When the launcher is lost it ends its processes, and then with status
255.
"""

from __future__ import annotations

import asyncio
import os
import time

from dglkge.errors import NotReadyError
from dglkge.launch.background import Report
from dglkge.launch.node_program import NodeProgram
from dglkge.launch.remote import handshake, protocol
from dglkge.launch.remote.node_place import NodePlace
from dglkge.launch.remote.protocol import HEARTBEAT_TIMEOUT_SECONDS, LOST_STATUS
from dglkge.launch.remote.ssh import forwarded_environment

RETRY_SECONDS = 1.0


def run_node(place: NodePlace, secret_file: str | None, python: str, seconds: float, report: Report) -> int:
    """Take part in a job as a node other than the first, with this process's environment; return its status.

    `seconds` limit the wait for the launcher; `report` takes messages for the user.
    """
    secret = handshake.read_secret(secret_file)
    # Processes run in another folder: relative search paths become absolute.
    os.environ.update(forwarded_environment(os.environ))

    async def run() -> int:
        peer = await connect(place, secret, seconds, report)
        where = f"{place.host}:{place.port}"
        greeting = f"node {place.rank} of {place.num_nodes}: connected to {where}"
        program = NodeProgram(peer, python, report, greeting)
        status, reason = await program.run()
        if program.is_told:
            if reason:
                report(f"the job has ended: {reason}")
        elif status == LOST_STATUS:
            report(f"the launcher at {where} is lost: {reason}; this node's part ends")
        return status

    return asyncio.run(run())


async def connect(place: NodePlace, secret: bytes, seconds: float, report: Report) -> protocol.Peer:
    """Connect to the launcher, which may start later than this node, and be admitted.

    Raises
    ------
    NotReadyError
        If the launcher does not listen in time, or cannot take this node yet.
    RefusedError
        If it refuses this node.
    """
    where = f"{place.host}:{place.port}"
    deadline = time.monotonic() + seconds
    has_told = False
    while True:
        try:
            return await asyncio.wait_for(_connect_once(place, secret), handshake.HANDSHAKE_SECONDS)
        except handshake.RefusedError as error:
            raise handshake.RefusedError(f"node 0 at {where} refuses node {place.rank}: {error}") from None
        except (OSError, EOFError, NotReadyError, asyncio.TimeoutError) as error:
            reason = _describe_failure(error)
        if time.monotonic() + RETRY_SECONDS > deadline:
            words = f"no launcher of node 0 at {where} within {seconds:g} s (--rendezvous_seconds)"
            raise NotReadyError(f"{words}: {reason}")
        if not has_told:
            report(f"waiting for node 0 at {where}: {reason}")
            has_told = True
        await asyncio.sleep(RETRY_SECONDS)


async def _connect_once(place: NodePlace, secret: bytes) -> protocol.Peer:
    """Connect to the launcher once; raises OSError, EOFError or NotReadyError if it may succeed later."""
    reader, writer = await asyncio.open_connection(place.host, place.port)
    try:
        address = place.address or str(writer.get_extra_info("sockname")[0])
        if ":" in address:
            raise handshake.RefusedError(
                f"this node reaches it from the IPv6 address {address}, and DGL's sockets are IPv4 only: "
                "give this machine's IPv4 address with --address"
            )
        await handshake.authenticate_launcher(reader, writer, secret)
        peer = protocol.Peer(reader, writer)
        hello = {"rank": place.rank, "num_nodes": place.num_nodes, "address": address}
        peer.tell("join", **hello, variables=sorted(os.environ))
        reply = await peer.receive()
        if not isinstance(reply, protocol.Reply):
            raise protocol.ProtocolError(f"no reply: {reply}")
        reply.check(handshake.RefusedError, NotReadyError)
        peer.heartbeat_timeout = HEARTBEAT_TIMEOUT_SECONDS
        return peer
    except BaseException:
        writer.close()
        raise


def _describe_failure(error: Exception) -> str:
    """Describe why a connection was not made."""
    if isinstance(error, EOFError):
        return "the connection ended"
    if isinstance(error, asyncio.TimeoutError):
        return f"no answer within {handshake.HANDSHAKE_SECONDS:g} s"
    if isinstance(error, OSError) and (error.errno or 0) > 0:  # asyncio's words name the call instead
        return os.strerror(error.errno or 0)
    return str(getattr(error, "strerror", None) or error)
