"""Mutual authentication of launcher and nodes over TCP by a shared secret, and lines of JSON after it.

Each side proves that it knows the secret by an HMAC of two random numbers, one of each side, so a recorded
proof is of no use later and the secret itself is never sent. Nothing is interpreted before, and no line is
longer than LONGEST_LINE_BYTES. What follows is neither encrypted nor signed, like all traffic of a job.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dglkge.errors import InputError
from dglkge.launch.ssh import SECRET_VARIABLE

PROTOCOL = 1
HANDSHAKE_SECONDS = 10.0
LONGEST_LINE_BYTES = 1 << 16
SHORTEST_SECRET = 16

WRONG_SECRET = f"wrong secret: --secret_file or {SECRET_VARIABLE} must be the same on all nodes"


class RefusedError(InputError):
    """The other side refuses the connection, or is no dglkge-launch."""


def read_secret(path: str | None, environment: Mapping[str, str]) -> bytes:
    """Return the secret that all nodes of a job share.

    Parameters
    ----------
    path : str or None
        A file with the secret, from ``--secret_file``.
    environment : mapping of str to str
        Its variable DGLKGE_SECRET is taken without a file.

    Raises
    ------
    InputError
        If there is none, it is shorter than SHORTEST_SECRET bytes, or the file cannot be read.
    """
    text = environment.get(SECRET_VARIABLE, "").encode()
    where = SECRET_VARIABLE
    if path is not None:
        where = path
        try:
            text = read_private(Path(path), "--secret_file")
        except OSError as error:
            raise InputError(f"cannot read --secret_file {path}: {error.strerror}") from None
    text = text.strip()
    if not text:
        raise InputError(
            "nodes without SSH need a shared secret, since whoever connects could run commands on them: give "
            f"--secret_file or the variable {SECRET_VARIABLE} (make one with: openssl rand -hex 32)"
        )
    if len(text) < SHORTEST_SECRET:
        raise InputError(f"the secret of {where} has {len(text)} bytes; expected at least {SHORTEST_SECRET}")
    return text


def read_private(path: Path, option: str) -> bytes:
    """Read a file with a secret.

    Parameters
    ----------
    path : Path
    option : str
        The option that names it, for messages. They do not show the path: it may be a secret that was given
        in place of a file.

    Raises
    ------
    InputError
        If other users can read it.
    OSError
        If it cannot be read.
    """
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        if mode & 0o077:
            raise InputError(f"other users can read the file of {option}: its mode is {mode:o}; chmod 600 it")
        return file.read()


class Peer:
    """An open connection that carries lines of JSON, for HANDSHAKE_SECONDS in all.

    Parameters
    ----------
    connection : socket.socket

    Attributes
    ----------
    received : bytes
        What has arrived after the last line.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""
        self._deadline = time.monotonic() + HANDSHAKE_SECONDS
        with contextlib.suppress(OSError):  # a socket pair, in a test
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message.

        Raises
        ------
        OSError
            If the connection is lost.
        """
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None at the end of the connection.

        Raises
        ------
        OSError
            If the connection is lost, the time is over, or what arrives is no message.
        """
        while b"\n" not in self.received:
            # One limit for all lines: who drips single bytes must not hold a place for ever.
            self.connection.settimeout(max(0.001, self._deadline - time.monotonic()))
            data = self.connection.recv(4096)
            if not data:
                return None
            self.received += data
            if len(self.received) > LONGEST_LINE_BYTES:
                raise OSError("a line is too long")
        line, _, self.received = self.received.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise OSError("a line is no message")
        return message


def _proof(secret: bytes, role: str, challenges: tuple[str, str], hello: str) -> str:
    """Return the HMAC by which one side proves that it knows the secret."""
    # The role keeps a proof of one side from being sent back as that of the other.
    text = json.dumps(["dglkge", PROTOCOL, role, *challenges, hello])
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _field(message: Mapping[str, Any] | None, name: str) -> str:
    """Return a text of a message, empty if it is absent or no text."""
    value = (message or {}).get(name)
    return value if isinstance(value, str) else ""


def authenticate_node(peer: Peer, secret: bytes) -> tuple[dict[str, Any], str]:
    """Check a node that has connected; the caller sends the proof, with which the launcher is checked.

    Returns
    -------
    hello : dict
        First message of the node.
    proof : str
        Of the launcher.

    Raises
    ------
    RefusedError
        If the other side does not know the secret; it has been told.
    OSError
        If the connection is lost or no dglkge-launch is at its other end.
    """
    ours = secrets.token_hex(32)
    peer.send({"dglkge": PROTOCOL, "challenge": ours})
    answer = peer.receive()
    challenges, hello = (ours, _field(answer, "challenge")), _field(answer, "hello")
    wanted = _proof(secret, "node", challenges, hello)
    if not hmac.compare_digest(wanted.encode(), _field(answer, "proof").encode()):
        peer.send({"error": WRONG_SECRET})
        raise RefusedError(WRONG_SECRET)
    message = json.loads(hello)
    if not isinstance(message, dict):
        raise OSError("no dglkge-launch")
    return message, _proof(secret, "launcher", challenges, hello)


def introduce_node(peer: Peer, secret: bytes, hello: Mapping[str, Any]) -> dict[str, Any]:
    """Authenticate this node to the launcher, and the launcher to this node; return its reply.

    Raises
    ------
    RefusedError
        If one side does not know the secret, or the launcher refuses the node.
    OSError
        If the connection is lost, or the launcher cannot take the node yet.
    """
    text, ours = json.dumps(hello), secrets.token_hex(32)
    greeting = peer.receive()
    if greeting is None:
        raise OSError("the connection ended")
    if greeting.get("dglkge") != PROTOCOL:
        raise RefusedError(f"it is no dglkge-launch of this version (greeting {str(greeting)[:60]!r})")
    challenges = (_field(greeting, "challenge"), ours)
    peer.send({"challenge": ours, "hello": text, "proof": _proof(secret, "node", challenges, text)})
    answer = peer.receive()
    if answer is None:
        raise OSError("the connection ended")
    wanted = _proof(secret, "launcher", challenges, text)
    if "proof" in answer and not hmac.compare_digest(wanted.encode(), _field(answer, "proof").encode()):
        raise RefusedError(WRONG_SECRET)
    if "retry" in answer:
        raise OSError(_field(answer, "error"))
    if "error" in answer or "proof" not in answer:
        raise RefusedError(_field(answer, "error") or "it sends no proof")
    return answer
