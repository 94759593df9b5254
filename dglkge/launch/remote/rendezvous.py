"""The first node's side of a job without SSH: accepts the node programs of the other nodes.

Every other node (:mod:`dglkge.launch.remote.node`) connects to one TCP port here, authenticates itself and
stays connected; its connection is that of its node program. So the nodes listen on nothing, and all that
holds for a job over SSH holds here.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dglkge.distributed.ip_config import Machine, read_ip_config
from dglkge.errors import DglkgeError, InputError, NotReadyError, exit_status_of
from dglkge.launch.connection import NodeConnection, close_all
from dglkge.launch.node_place import NodePlace
from dglkge.launch.protocol import JobEnd
from dglkge.launch.remote.handshake import Peer, RefusedError, authenticate_node, read_secret
from dglkge.launch.ssh import NOT_INHERITED, forwarded_environment
from dglkge.launch.stop_signals import StopForwarder, describe_stop

MOST_HANDSHAKES = 64
"""Most connections whose handshake is not finished; further ones are closed."""

END_SECONDS = 5.0
POLL_SECONDS = 0.2


@contextlib.contextmanager
def nodes_of_job(
    place: NodePlace | None, secret_file: str | None, seconds: float, report: Callable[[str], None]
) -> Iterator[Rendezvous | None]:
    """Accept the nodes of a job inside the block, and tell them an error that ends it.

    Parameters
    ----------
    place : NodePlace or None
        This node's, the first; None: a job on one machine or over SSH.
    secret_file : str or None
        None: the secret is in the environment, from which it is removed.
    seconds : float
        Timeout for nodes to connect.
    report : callable
        Takes messages for the user.

    Yields
    ------
    Rendezvous or None
        None if there are no other nodes.
    """
    if place is None or place.num_nodes == 1:
        yield None
        return
    secret = read_secret(secret_file, os.environ)
    # No process of the job may inherit it.
    for name in NOT_INHERITED:
        os.environ.pop(name, None)
    nodes = Rendezvous(place.host, place.port, place.num_nodes, secret, seconds, report)
    try:
        yield nodes
    except DglkgeError as error:
        nodes.end(exit_status_of(error), str(error))
        raise
    except KeyboardInterrupt as error:
        words, status = describe_stop(error)
        nodes.end(status, words)
        raise
    finally:
        nodes.close()


class Rendezvous:
    """Accepts the nodes 1 to N - 1 of a job and keeps their connections; the launcher is node 0.

    Parameters
    ----------
    host, port
        Where nodes connect. It listens on the host's address if that is this machine's, else (the name of a
        service, an address before a NAT) on all interfaces.
    num_nodes : int
        Node 0 included.
    secret : bytes
    seconds : float
        Timeout of :meth:`await_nodes`.
    report : callable
        Takes messages for the user.

    Raises
    ------
    NotReadyError
        If the port is in use.
    """

    def __init__(
        self,
        host: str,
        port: int,
        num_nodes: int,
        secret: bytes,
        seconds: float,
        report: Callable[[str], None],
    ) -> None:
        self.num_nodes = num_nodes
        self._where = f"{host}:{port}"
        self._secret = secret
        self._seconds = seconds
        self._report = report
        self._nodes: dict[int, NodeConnection] = {}
        self._came: set[int] = set()
        self._left: dict[int, str] = {}
        self._refused: dict[str, str] = {}
        self._changed = threading.Condition()
        self._handshakes = threading.BoundedSemaphore(MOST_HANDSHAKES)
        self._is_closing = threading.Event()
        self._has_ended = threading.Event()
        self._forwarder = StopForwarder(report)
        self._listener = listen(host, port)
        threading.Thread(target=self._accept_nodes, daemon=True, name="dglkge-rendezvous").start()

    def await_nodes(self) -> None:
        """Wait until all nodes are connected.

        Raises
        ------
        NotReadyError
            If some have not come in time; the message names them, those that came, and refused ones.
        """
        deadline = time.monotonic() + self._seconds
        has_told = False
        with self._changed:
            while missing := [rank for rank in range(1, self.num_nodes) if rank not in self._nodes]:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise NotReadyError(self._describe_missing(missing))
                if not has_told:
                    names = ", ".join(map(str, missing))
                    self._report(f"waiting at {self._where} for node {names} of {self.num_nodes}")
                    has_told = True
                # A short timeout: Python runs handlers of signals in this thread between two waits only.
                self._changed.wait(min(left, POLL_SECONDS))

    def addresses(self) -> list[str]:
        """Return the addresses of nodes 1 to N - 1, in the order of their ranks."""
        with self._changed:
            return [self._nodes[rank].address for rank in range(1, self.num_nodes) if rank in self._nodes]

    def own_address(self) -> str | None:
        """Return the IPv4 address of this machine that the nodes reach; None if it is not known."""
        with self._changed:
            sockets = [self._listener, *(node.socket for node in self._nodes.values())]
        for each in sockets:
            with contextlib.suppress(OSError, ValueError):
                address = ipaddress.ip_address(each.getsockname()[0])
                mapped = getattr(address, "ipv4_mapped", None) or address
                if mapped.version == 4 and not mapped.is_unspecified and not mapped.is_loopback:
                    return str(mapped)
        return None

    def machines(self, ip_config: Path | None, address: str | None) -> list[Machine]:
        """Wait for all nodes; return the machines of the job.

        Parameters
        ----------
        ip_config : Path or None
            A file whose line k is node k; None: the nodes' own addresses.
        address : str or None
            Of this node; None: the one that the others reach.

        Raises
        ------
        InputError
            If nodes have not come in time, the file has another number of lines, or this node's IPv4 address
            is not known.
        """
        machines = [] if ip_config is None else read_ip_config(ip_config)
        if machines and len(machines) != self.num_nodes:
            raise InputError(
                f"{ip_config} names {len(machines)} machines, the job was started for {self.num_nodes}"
            )
        self.await_nodes()
        if machines:
            return machines
        own = address or self.own_address()
        if own is None:
            raise InputError(
                "the IPv4 address of this node is not known, which DGL needs: give it with --address"
            )
        return [Machine(address, has_port=False) for address in (own, *self.addresses())]

    def connection(self, rank: int) -> NodeConnection:
        """Return the connection of a node.

        Raises
        ------
        NotReadyError
            If it is not connected at present.
        """
        with self._changed:
            node = self._nodes.get(rank)
            why = self._left.get(rank, "it has not connected")
        if node is None:
            raise NotReadyError(f"cannot be reached by its node's dglkge-launch: {why}")
        return node

    def end(self, status: int, reason: str) -> None:
        """Tell all nodes that the job has ended with a status; they exit with it.

        Nodes that have not come yet are waited for END_SECONDS: else they would wait for a launcher in vain.
        """
        deadline = time.monotonic() + END_SECONDS
        with self._changed:
            while len(self._came) < self.num_nodes - 1 and time.monotonic() < deadline:
                self._changed.wait(POLL_SECONDS)
            nodes = list(self._nodes.values())
        self._has_ended.set()  # before a node is told and leaves
        for node in nodes:
            node.send(JobEnd(status, reason))

    def close(self) -> None:
        """Close all connections. Nodes that were not told the end count the launcher as lost."""
        self._is_closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends a blocked accept()
        self._listener.close()
        with self._changed:
            nodes = list(self._nodes.values())
        close_all(nodes)

    def _describe_missing(self, missing: Sequence[int]) -> str:
        """Describe which nodes have not come; called under the lock."""
        words = f"node {', '.join(map(str, missing))} of {self.num_nodes} did not connect to {self._where}"
        words += f" within {self._seconds:g} s (--rendezvous_seconds)"
        came = ", ".join(f"{rank} ({node.address})" for rank, node in sorted(self._nodes.items()))
        words += f"; connected: 0{', ' + came if came else ''}"
        for rank in missing:
            if rank in self._left:
                words += f"; node {rank}: {self._left[rank]}"
        for address, why in self._refused.items():
            words += f"; refused {address}: {why}"
        return words

    def _accept_nodes(self) -> None:
        """Accept connections until closed; the body of a thread."""
        while not self._is_closing.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError:  # closed, or out of file descriptors: others may be closed meanwhile
                self._is_closing.wait(POLL_SECONDS)
                continue
            if not self._handshakes.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(
                target=self._welcome, args=(connection, str(address[0])), daemon=True, name="dglkge-node"
            ).start()

    def _welcome(self, connection: socket.socket, address: str) -> None:
        """Authenticate a connection, and use it for what it asks; the body of a thread."""
        address = address[len("::ffff:") :] if address.startswith("::ffff:") else address
        try:
            peer = Peer(connection)
            hello, proof = authenticate_node(peer, self._secret)
            self._admit(peer, hello, proof, address)
        except RefusedError as error:
            self._refuse(address, str(error))
            connection.close()
            return
        except (OSError, ValueError, KeyError, TypeError):  # a port scan, or a connection that was lost
            connection.close()
            return
        finally:
            self._handshakes.release()

    def _refuse(self, address: str, why: str) -> None:
        """Record a refused connection; report it once for each address and reason."""
        with self._changed:
            is_new = self._refused.get(address) != why and len(self._refused) < MOST_HANDSHAKES
            if is_new:
                self._refused[address] = why
        if is_new:
            self._report(f"warning: refused a connection from {address}: {why}")

    def _admit(self, peer: Peer, hello: Mapping[str, Any], proof: str, address: str) -> None:
        """Add a node to those of the job.

        Raises
        ------
        RefusedError
            If its rank is taken or not of this job; it has been told.
        """
        rank, num_nodes, own_address = int(hello["rank"]), int(hello["nodes"]), str(hello["address"])
        variables = set(map(str, hello["variables"]))
        problem, retry = None, {}
        with self._changed:
            if num_nodes != self.num_nodes:
                problem = f"it is started for {num_nodes} nodes, node 0 for {self.num_nodes}"
            elif not 1 <= rank < self.num_nodes:
                problem = f"it has rank {rank}; allowed are 1 to {self.num_nodes - 1}, node 0 is the launcher"
            elif rank in self._nodes:
                # An earlier process of a node that was started again may not count as lost yet.
                problem = f"node {rank} is connected already, from {self._nodes[rank].address}"
                retry = {"retry": True}
            if problem is None:
                # Sent under the lock: the node is told of its admission before anything else.
                peer.send({"proof": proof})
                peer.connection.settimeout(None)
                # The node's own variables win: a scheduler sets some of them for each node.
                environment = forwarded_environment(os.environ)
                self._nodes[rank] = NodeConnection(
                    own_address,
                    peer.connection,
                    environment={name: value for name, value in environment.items() if name not in variables},
                    on_stop=lambda number: self._forwarder.forward(f"node {rank} ({own_address})", number),
                    on_lost=lambda why: self._lose(rank, own_address, why),
                    received=peer.received,
                )
                self._came.add(rank)
                self._refused.pop(address, None)
                self._changed.notify_all()
        if problem is not None:
            peer.send({"proof": proof, "error": problem, **retry})
            raise RefusedError(problem)

    def _lose(self, rank: int, address: str, why: str) -> None:
        """Remove a node whose connection has ended; called in the thread of its connection."""
        with self._changed:
            self._left[rank] = why
            del self._nodes[rank]
            self._changed.notify_all()
        if not self._has_ended.is_set() and not self._is_closing.is_set():
            self._report(f"node {rank} ({address}) is lost: {why}")


def listen(host: str, port: int) -> socket.socket:
    """Listen on the address of a host if this machine has it, else on all interfaces.

    Raises
    ------
    NotReadyError
        If the port is in use.
    """
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:  # the name of a service that does not exist yet
        candidates = []
    is_dual = socket.has_dualstack_ipv6()
    places: list[tuple[Any, int, bool]] = [
        (address, family, False)
        for family, _, _, _, address in candidates
        # Debian gives a machine's own name the address 127.0.1.1, which no other node reaches.
        if address[0] == host or not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    ]
    places.append((("", port), socket.AF_INET6 if is_dual else socket.AF_INET, is_dual))
    for address, family, is_on_all in places:
        try:
            return socket.create_server(
                address, family=family, backlog=MOST_HANDSHAKES, dualstack_ipv6=is_on_all
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NotReadyError(
                    f"port {port} of the rendezvous {host} is in use on this machine: give all nodes another "
                    "one with --rendezvous host:port"
                ) from None
            reason = error.strerror
    raise InputError(f"cannot listen on port {port} for --rendezvous: {reason}")
