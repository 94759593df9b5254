"""A node of a job without SSH: connects to the first node's launcher, and runs what that asks for.

The node takes the place of sshd. For each channel it connects once more and runs one command, the launcher's
agent, a watchdog or tar, with its three pipes over that connection. It ends with the exit status of the job.
When the launcher is lost, the pipes close: agents exit and watchdogs end their processes, and the node ends
with status 255 once they have.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from dglkge.distributed.ip_config import read_ip_config
from dglkge.errors import NotReadyError
from dglkge.launch.machine import local_interfaces
from dglkge.launch.node_place import NodePlace, node_place
from dglkge.launch.node_program import GRACE_SECONDS, KILL_LIMIT_SECONDS
from dglkge.launch.protocol import HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT_SECONDS
from dglkge.launch.remote.channel import COMMAND, EXIT, STDERR, STDIN, STDOUT, Frames, write_all
from dglkge.launch.remote.handshake import HANDSHAKE_SECONDS, Peer, RefusedError, introduce_node, read_secret
from dglkge.launch.ssh import NOT_INHERITED, forwarded_environment
from dglkge.launch.stop_signals import signals_recorded, status_of_stop

LOST_STATUS = 255
NOT_FOUND_STATUS = 127

RETRY_SECONDS = 1.0
REAP_SECONDS = 5.0
POLL_SECONDS = 0.2

LEAVE_SECONDS = GRACE_SECONDS + KILL_LIMIT_SECONDS + 4.0
"""Time for watchdogs to end their processes once the launcher is lost; later they are killed."""


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
        See :meth:`Node.run`.
    """
    secret = read_secret(secret_file, os.environ)
    own = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    # Agents run in another folder: relative search paths become absolute.
    environment = {**own, **forwarded_environment(own)}
    return Node(place, secret, python, environment, report).run(seconds)


class Node:
    """One node but the first.

    Parameters
    ----------
    place : NodePlace
    secret : bytes
    python : str
        This node's interpreter.
    environment : mapping of str to str
        Of the commands that run here.
    report : callable
        Takes messages for the user.
    """

    def __init__(
        self,
        place: NodePlace,
        secret: bytes,
        python: str,
        environment: Mapping[str, str],
        report: Callable[[str], None],
    ) -> None:
        self._place = place
        self._secret = secret
        self._python = python
        self._environment = dict(environment)
        self._report = report
        self._where = f"{place.host}:{place.port}"
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._why = "the connection ended"
        self._channels: dict[int, threading.Thread] = {}
        self._connections: set[socket.socket] = set()
        self._changed = threading.Lock()

    def run(self, seconds: float) -> int:
        """Take part in one job; return its exit status.

        Parameters
        ----------
        seconds : float
            Timeout for the first connection to the launcher.

        Raises
        ------
        NotReadyError
            If the launcher does not listen in time.
        RefusedError
            If it refuses this node.
        """
        peer = self._connect(seconds)
        threading.Thread(target=self._read, args=(peer,), daemon=True).start()
        signals: list[int] = []
        try:
            with signals_recorded(signals):
                self._report(
                    f"node {self._place.rank} of {self._place.num_nodes}: connected to {self._where}"
                )
                return self._serve(peer, signals)
        finally:
            self._leave(peer)

    def _serve(self, peer: Peer, signals: Sequence[int]) -> int:
        """Open channels until the launcher tells the end of the job; return the status."""
        num_signals = 0
        last_sent = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                message = self._messages.get(timeout=POLL_SECONDS)
                if message is None:
                    self._report(f"the launcher at {self._where} is lost: {self._why}; this node's part ends")
                    return LOST_STATUS
                if "end" in message:
                    if message.get("reason"):
                        self._report(f"the job has ended: {message['reason']}")
                    return int(message["end"])
                if "open" in message:
                    self._start_channel(str(message["open"]))
            # Sent by this loop and not by a thread: a node that hangs counts as lost.
            if time.monotonic() - last_sent >= HEARTBEAT_SECONDS:
                last_sent = time.monotonic()
                self._send(peer, None)
            if len(signals) > num_signals:
                num_signals += 1
                number = signals[num_signals - 1]
                name = signal.Signals(number).name
                if num_signals > 1:
                    self._report(f"stopped by a second signal, {name}: this node's part ends")
                    self._send(peer, {"problem": f"stopped by a second signal, {name}"})
                    return status_of_stop(number)
                self._report(f"received {name}: the launcher stops the job; a second signal ends this node")
                self._send(peer, {"signal": number})

    def _send(self, peer: Peer, message: Mapping[str, Any] | None) -> None:
        """Send to the launcher; the thread that reads finds the end of the connection."""
        with contextlib.suppress(OSError):
            peer.send(message)

    def _connect(self, seconds: float) -> Peer:
        """Connect to the launcher, which may start later than this node."""
        deadline = time.monotonic() + seconds
        has_told = False
        while True:
            try:
                return self._open(self._hello)
            except OSError as error:
                if time.monotonic() + RETRY_SECONDS > deadline:
                    raise NotReadyError(
                        f"no launcher of node 0 at {self._where} within {seconds:g} s (--rendezvous_seconds)"
                        f": {error.strerror or error}"
                    ) from None
                if not has_told:
                    self._report(f"waiting for node 0 at {self._where}: {error.strerror or error}")
                    has_told = True
            time.sleep(RETRY_SECONDS)

    def _open(self, hello: Callable[[socket.socket], Mapping[str, Any]]) -> Peer:
        """Connect to the launcher once and authenticate.

        Raises
        ------
        OSError
            If the launcher cannot be reached.
        RefusedError
            If it refuses.
        """
        connection = socket.create_connection((self._place.host, self._place.port), HANDSHAKE_SECONDS)
        try:
            peer = Peer(connection)
            introduce_node(peer, self._secret, hello(connection))
        except RefusedError as error:
            connection.close()
            raise RefusedError(f"node 0 at {self._where} refuses node {self._place.rank}: {error}") from None
        except BaseException:
            connection.close()
            raise
        return peer

    def _hello(self, connection: socket.socket) -> Mapping[str, Any]:
        """Return the first message: who this node is."""
        address = self._place.address or str(connection.getsockname()[0])
        if ":" in address:
            raise RefusedError(
                f"this node reaches it from the IPv6 address {address}, and DGL's sockets are IPv4 only: "
                "give this machine's IPv4 address with --address"
            )
        return {
            "rank": self._place.rank,
            "nodes": self._place.num_nodes,
            "address": address,
            "python": self._python,
            "variables": sorted(self._environment),
        }

    def _read(self, peer: Peer) -> None:
        """Queue the launcher's messages, at last None; the body of a thread."""
        peer.connection.settimeout(HEARTBEAT_TIMEOUT_SECONDS)
        try:
            while (message := peer.receive()) is not None:
                if message:
                    self._messages.put(message)
        except TimeoutError:
            self._why = f"no heartbeat for {HEARTBEAT_TIMEOUT_SECONDS:g} s"
        except OSError as error:
            self._why = error.strerror or str(error)
        self._messages.put(None)

    def _start_channel(self, token: str) -> None:
        """Run one channel in a thread."""
        thread = threading.Thread(target=self._run_channel, args=(token,), daemon=True)
        with self._changed:
            self._channels = {key: each for key, each in self._channels.items() if each.is_alive()}
            self._channels[id(thread)] = thread
        thread.start()

    def _run_channel(self, token: str) -> None:
        """Connect once more and run the command that the launcher sends; the body of a thread."""
        try:
            peer = self._open(lambda _: {"channel": token})
        except (OSError, RefusedError):
            return  # the launcher's client reports that no channel was opened
        connection = peer.connection
        connection.settimeout(None)
        with self._changed:
            self._connections.add(connection)
        try:
            with contextlib.suppress(OSError, ValueError):
                frames = Frames(connection, peer.received)
                first = frames.receive()
                if first is not None and first[0] == COMMAND:
                    run_command(json.loads(first[1]), self._environment, frames)
        finally:
            with self._changed:
                self._connections.discard(connection)
            peer.close()

    def _leave(self, peer: Peer) -> None:
        """Close all connections and wait until the commands have ended, at most LEAVE_SECONDS."""
        deadline = time.monotonic() + LEAVE_SECONDS
        with self._changed:
            threads = list(self._channels.values())
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                # Also ends a thread that is blocked in a read: it then closes the stdin of its command.
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        peer.close()


def run_command(words: Sequence[str], environment: Mapping[str, str], frames: Frames) -> None:
    """Run a command with its three pipes over a connection; send its exit status, 128 + n for signal n.

    When the connection ends, the stdin of the command is closed. It is killed if it still runs after
    LEAVE_SECONDS.
    """
    try:
        process = subprocess.Popen(
            list(words),
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        frames.send(STDERR, f"cannot start {words[0]}: {error.strerror}\n".encode())
        frames.send(EXIT, b"%d" % NOT_FOUND_STATUS)
        return
    readers = [
        threading.Thread(target=_send_output, args=(cast(IO[bytes], pipe), kind, frames), daemon=True)
        for pipe, kind in ((process.stdout, STDOUT), (process.stderr, STDERR))
    ]
    is_ended = threading.Event()
    writer = threading.Thread(
        target=_receive_stdin, args=(cast(IO[bytes], process.stdin), frames, is_ended), daemon=True
    )
    for thread in (*readers, writer):
        thread.start()
    ended_at: float | None = None
    # Its output may go on after its end, if it has descendants with the same pipes.
    while process.poll() is None or any(reader.is_alive() for reader in readers):
        _await_exit(process)
        for reader in readers:
            if process.returncode is not None:
                reader.join(POLL_SECONDS)
        ended_at = ended_at or (time.monotonic() if is_ended.is_set() else None)
        # Watchdogs and tar end at the end of their stdin; this is for one that does not.
        if ended_at is not None and time.monotonic() - ended_at > LEAVE_SECONDS:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            _await_exit(process)
            return
    frames.send(EXIT, b"%d" % (process.returncode if process.returncode >= 0 else 128 - process.returncode))
    # The client closes the connection. Closed here with unread bytes, it would lose what was sent last.
    writer.join(REAP_SECONDS)


def _await_exit(process: subprocess.Popen[bytes]) -> None:
    """Wait for POLL_SECONDS or until a process has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(POLL_SECONDS)


def _send_output(pipe: IO[bytes], kind: int, frames: Frames) -> None:
    """Send one pipe to its end; reads on if the connection is lost, so that the command is not blocked."""
    is_lost = False
    with pipe:
        while data := os.read(pipe.fileno(), 65536):
            if not is_lost:
                try:
                    frames.send(kind, data)
                except OSError:
                    is_lost = True


def _receive_stdin(pipe: IO[bytes], frames: Frames, is_ended: threading.Event) -> None:
    """Write to the stdin of a command what arrives; close it at the end of file or of the connection."""
    has_closed = False
    with contextlib.suppress(OSError):
        while (frame := frames.receive()) is not None:
            kind, data = frame
            if kind != STDIN or has_closed:
                continue
            if data:
                with contextlib.suppress(OSError):  # the command has closed its stdin; it may still write
                    write_all(pipe.fileno(), data)
            else:
                pipe.close()
                has_closed = True
    # The connection has ended: also the launcher's client may have been killed.
    is_ended.set()
    with contextlib.suppress(OSError):
        pipe.close()
