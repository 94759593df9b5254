"""Both sides of a job without SSH: node 0's launcher accepts the node programs of the other nodes.

Every other node connects to one TCP port of the launcher, authenticates itself and stays connected; its
connection is that of its node program. So the nodes listen on nothing, and all that holds for a job over SSH
holds here. A node ends with the exit status of the job. When the launcher is lost it ends its processes, and
then with status 255.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dglkge.distributed.addresses import Machine, read_ip_config
from dglkge.errors import DglkgeError, InputError, NotReadyError
from dglkge.launch.background import Report, wait
from dglkge.launch.node_program import NodeProgram
from dglkge.launch.remote import protocol
from dglkge.launch.remote.connection import NodeConnection, close_all, forwarded_environment
from dglkge.launch.remote.node_place import NodePlace
from dglkge.launch.stop_signals import describe_stop, forward_stop

MOST_HANDSHAKES = 64
"""Most connections whose handshake is not finished; further ones are closed."""

END_SECONDS = 5.0
RETRY_SECONDS = 1.0
POLL_SECONDS = 0.2


@contextlib.contextmanager
def nodes_of_job(
    place: NodePlace | None, secret_file: str | None, seconds: float, report: Report
) -> Iterator[Rendezvous | None]:
    """Accept the nodes of a job inside the block, and tell them an error that ends it.

    Yields None if there are no other nodes: on one machine or over SSH (`place` is None), or for one node.
    """
    if place is None or place.num_nodes == 1:
        yield None
        return
    nodes = Rendezvous(place, protocol.read_secret(secret_file), seconds, report)
    try:
        yield nodes
    except (DglkgeError, KeyboardInterrupt) as error:
        words, status = describe_stop(error)
        wait(nodes.end(status, words))
        raise
    finally:
        wait(nodes.close())


class Rendezvous:
    """Accepts the nodes 1 to N - 1 of a job and keeps their connections; the launcher is node 0.

    It listens on the host's address if that is this machine's, else (the name of a service, an address before
    a NAT) on all interfaces. `seconds` limit :meth:`await_nodes`. Raises NotReadyError if the port is in use.
    """

    def __init__(self, place: NodePlace, secret: bytes, seconds: float, report: Report) -> None:
        self._place, self.num_nodes = place, place.num_nodes
        self._where = f"{place.host}:{place.port}"
        self._secret = secret
        self._seconds = seconds
        self._report = report
        self._nodes: dict[int, NodeConnection] = {}
        self._why_lost: dict[int, str] = {}
        self._refused: dict[str, str] = {}
        self._handshakes = asyncio.Semaphore(MOST_HANDSHAKES)
        self._has_ended = False
        self._listener = listen(place.host, place.port)
        self._server = wait(asyncio.start_server(self._welcome, sock=self._listener))

    def machines(self, ip_config: Path) -> list[Machine]:
        """Wait for all nodes; return their machines: line k for node k of the file, if that names them.

        Raises InputError if nodes have not come in time, the file has another number of lines, or this node's
        IPv4 address is not known.
        """
        machines = read_ip_config(ip_config) if self._place.has_ip_config else []
        if machines and len(machines) != self.num_nodes:
            raise InputError(f"{ip_config} names {len(machines)} machines, the job has {self.num_nodes}")
        wait(self.await_nodes())
        if machines:
            return machines
        nodes = [node for _, node in sorted(self._nodes.items())]
        sockets = [self._listener, *(node.writer.get_extra_info("socket") for node in nodes)]
        addresses = [self._place.address or own_address(sockets), *(node.address for node in nodes)]
        return [Machine(address, has_port=False) for address in addresses]

    async def await_nodes(self) -> None:
        """Wait until all nodes are connected; the NotReadyError names the missing, connected and refused."""
        deadline, has_told = time.monotonic() + self._seconds, False
        while missing := [rank for rank in range(1, self.num_nodes) if rank not in self._nodes]:
            names = f"node {', '.join(map(str, missing))} of {self.num_nodes}"
            if time.monotonic() >= deadline:
                raise NotReadyError(names + self._describe_missing(missing))
            if not has_told:
                self._report(f"waiting at {self._where} for {names}")
                has_told = True
            await asyncio.sleep(POLL_SECONDS)

    def connection(self, rank: int) -> NodeConnection:
        """Return the connection of a node; raises NotReadyError if it is not connected at present."""
        node = self._nodes.get(rank)
        if node is None:
            why = self._why_lost.get(rank, "it has not connected")
            raise NotReadyError(f"cannot be reached by its node's dglkge-launch: {why}")
        return node

    async def end(self, status: int, reason: str) -> None:
        """Tell all nodes that the job has ended with a status; they exit with it.

        Nodes that have not come yet are waited for END_SECONDS: else they would wait for a launcher in vain.
        """
        deadline = time.monotonic() + END_SECONDS
        while len({*self._nodes, *self._why_lost}) < self.num_nodes - 1 and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        self._has_ended = True  # before a node is told and leaves
        for node in list(self._nodes.values()):  # each of them may be lost meanwhile
            node.tell("end", status=status, reason=reason)
            await node.drain()

    async def close(self) -> None:
        """Close all connections. Nodes that were not told the end count the launcher as lost."""
        self._server.close()
        self._has_ended = True
        await close_all(list(self._nodes.values()))

    def _describe_missing(self, missing: Sequence[int]) -> str:
        """Describe why nodes have not come."""
        came = ["0", *(f"{rank} ({node.address})" for rank, node in sorted(self._nodes.items()))]
        words = f" did not connect to {self._where} within {self._seconds:g} s (--rendezvous_seconds)"
        reasons = [f"node {rank}: {self._why_lost[rank]}" for rank in missing if rank in self._why_lost]
        reasons += [f"refused {address}: {why}" for address, why in self._refused.items()]
        return "; ".join([words, f"connected: {', '.join(came)}", *reasons])

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Authenticate a connection and admit its node."""
        if self._handshakes.locked():
            writer.close()
            return
        address = str(writer.get_extra_info("peername")[0]).removeprefix("::ffff:")
        async with self._handshakes:
            try:
                await asyncio.wait_for(self._admit((reader, writer)), protocol.HANDSHAKE_SECONDS)
                self._refused.pop(address, None)
            # Others than InputError: a port scan, or a connection that was lost.
            except (InputError, OSError, EOFError, asyncio.TimeoutError, TypeError, ValueError) as error:
                writer.close()
                is_new = isinstance(error, InputError) and self._refused.get(address) != str(error)
                if is_new and len(self._refused) < MOST_HANDSHAKES:
                    self._refused[address] = str(error)
                    self._report(f"warning: refused a connection from {address}: {error}")

    async def _admit(self, streams: protocol.Streams) -> None:
        """Add a node to those of the job; raises RefusedError or NotReadyError, which it has been told."""
        await protocol.authenticate_node(streams, self._secret)
        peer = protocol.Peer(streams)
        hello = await peer.receive()
        if not isinstance(hello, protocol.Call):
            raise protocol.ProtocolError(f"no message of a node: {hello}")
        reply = protocol.answer(hello, {"join": functools.partial(self._join, streams)})
        peer.send(reply)
        await peer.drain()
        reply.check(protocol.RefusedError, NotReadyError)

    def _join(
        self, streams: protocol.Streams, rank: int, num_nodes: int, address: str, variables: Sequence[str]
    ) -> dict[str, str]:
        """Add a node to those of the job; return variables for it to set; raises as :meth:`_admit`."""
        if num_nodes != self.num_nodes:
            raise protocol.RefusedError(f"it is started for {num_nodes} nodes, node 0 for {self.num_nodes}")
        if not 1 <= rank < self.num_nodes:
            allowed = f"1 to {self.num_nodes - 1}, node 0 is the launcher"
            raise protocol.RefusedError(f"it has rank {rank}; allowed are {allowed}")
        if rank in self._nodes:
            # An earlier process of a node that was started again may not count as lost yet.
            raise NotReadyError(f"node {rank} is connected already, from {self._nodes[rank].address}")
        node = self._nodes[rank] = NodeConnection(address, streams)
        node.on_stop = functools.partial(forward_stop, self._report, f"node {rank} ({address})")
        node.on_lost = lambda why: self._lose(rank, address, why)
        # The node's own variables win: a scheduler sets some of them for each node.
        forwarded = forwarded_environment(os.environ)
        return {name: value for name, value in forwarded.items() if name not in variables}

    def _lose(self, rank: int, address: str, why: str) -> None:
        """Remove a node whose connection has ended."""
        self._why_lost[rank] = why
        del self._nodes[rank]
        if not self._has_ended:
            self._report(f"node {rank} ({address}) is lost: {why}")


def own_address(sockets: Sequence[socket.socket]) -> str:
    """Return the IPv4 address of this machine at one end of a socket, which other nodes reach."""
    for endpoint in sockets:
        with contextlib.suppress(OSError, ValueError):
            address = ipaddress.ip_address(endpoint.getsockname()[0].removeprefix("::ffff:"))
            if address.version == 4 and not address.is_unspecified and not address.is_loopback:
                return str(address)
    raise InputError("the IPv4 address of this node is not known, which DGL needs: give it with --address")


def listen(host: str, port: int) -> socket.socket:
    """Listen on the address of a host if this machine has it, else on all interfaces."""
    places: list[tuple[Any, int, bool]] = []
    with contextlib.suppress(OSError):  # the name of a service that does not exist yet
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            # Debian gives a machine's own name the address 127.0.1.1, which no other node reaches.
            if address[0] == host or not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
                places.append((address, family, False))
    is_dual = socket.has_dualstack_ipv6()
    places.append((("", port), socket.AF_INET6 if is_dual else socket.AF_INET, is_dual))
    for place, kind, is_on_all in places:
        try:
            return socket.create_server(place, family=kind, dualstack_ipv6=is_on_all)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NotReadyError(
                    f"port {port} of the rendezvous {host} is in use on this machine: give all nodes another "
                    "one with --rendezvous host:port"
                ) from None
            reason = error.strerror
    raise InputError(f"cannot listen on port {port} for --rendezvous: {reason}")


def run_node(place: NodePlace, secret_file: str | None, python: str, seconds: float, report: Report) -> int:
    """Take part in a job as a node other than the first, with this process's environment; return its status.

    `seconds` limit the wait for the launcher; `report` takes messages for the user.
    """
    secret = protocol.read_secret(secret_file)
    # Processes run in another folder: relative search paths become absolute.
    os.environ.update(forwarded_environment(os.environ))

    async def run() -> int:
        peer = await connect(place, secret, seconds, report)
        where = f"{place.host}:{place.port}"
        greeting = f"node {place.rank} of {place.num_nodes}: connected to {where}"
        return await NodeProgram(peer, python, report, where).run(greeting)

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
    where, reason = f"{place.host}:{place.port}", ""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await asyncio.wait_for(_connect_once(place, secret), protocol.HANDSHAKE_SECONDS)
        except protocol.RefusedError as error:
            raise protocol.RefusedError(f"node 0 at {where} refuses node {place.rank}: {error}") from None
        except (OSError, EOFError, NotReadyError, asyncio.TimeoutError) as error:
            is_first, reason = not reason, _describe_failure(error)
        if time.monotonic() + RETRY_SECONDS > deadline:
            words = f"no launcher of node 0 at {where} within {seconds:g} s (--rendezvous_seconds)"
            raise NotReadyError(f"{words}: {reason}")
        if is_first:
            report(f"waiting for node 0 at {where}: {reason}")
        await asyncio.sleep(RETRY_SECONDS)


async def _connect_once(place: NodePlace, secret: bytes) -> protocol.Peer:
    """Connect to the launcher once; raises OSError, EOFError or NotReadyError if it may succeed later."""
    reader, writer = await asyncio.open_connection(place.host, place.port)
    try:
        address = place.address or str(writer.get_extra_info("sockname")[0])
        if ":" in address:
            raise protocol.RefusedError(
                f"this node reaches it from the IPv6 address {address}, and DGL's sockets are IPv4 only: "
                "give this machine's IPv4 address with --address"
            )
        await protocol.authenticate_launcher((reader, writer), secret)
        peer = protocol.Peer((reader, writer))
        hello = {"rank": place.rank, "num_nodes": place.num_nodes, "address": address}
        peer.tell("join", **hello, variables=sorted(os.environ))
        reply = await peer.receive()
        if not isinstance(reply, protocol.Reply):
            raise protocol.ProtocolError(f"no reply: {reply}")
        reply.check(protocol.RefusedError, NotReadyError)
        os.environ.update(reply.value)
        peer.heartbeat_timeout = protocol.HEARTBEAT_TIMEOUT_SECONDS
        return peer
    except BaseException:
        writer.close()
        raise


def _describe_failure(error: Exception) -> str:
    """Describe why a connection was not made."""
    if isinstance(error, EOFError):
        return "the connection ended"
    if isinstance(error, asyncio.TimeoutError):
        return f"no answer within {protocol.HANDSHAKE_SECONDS:g} s"
    if isinstance(error, OSError) and (error.errno or 0) > 0:  # asyncio's words name the call instead
        return os.strerror(error.errno or 0)
    return str(getattr(error, "strerror", None) or error)
