"""Streams between launcher and node programs, node programs and their trainers: authentication, then calls.

A message is a call or the reply to one: the length of its head and of its data (4 bytes each, big-endian),
the head in JSON, the data. A node program sends :data:`MARK` first: what comes before it is output of a login
shell.

Over TCP, without SSH, launcher and node authenticate each other first, by a shared secret. Each side proves
that it knows the secret by an HMAC of two random numbers, one of each side, so a recorded proof is of no use
later and the secret itself is never sent. All parts have fixed lengths, and nothing else is read before. What
follows is neither encrypted nor signed, like all traffic of a job.

1. The launcher sends :data:`GREETING` and its random number.
2. The node sends its random number and its proof.
3. The launcher sends its proof, or zeros if the node's is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import itertools
import json
import os
import secrets
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dglkge.errors import DglkgeError, InputError, NotReadyError, os_errors
from dglkge.launch.background import spawn

SECRET_VARIABLE = "DGLKGE_SECRET"
"""Secret of jobs without SSH; never given to another process."""

NOT_INHERITED = (SECRET_VARIABLE, "TORCHELASTIC_USE_AGENT_STORE")
"""Removed from the environment of jobs without SSH. torchrun sets the second: torch would then connect to the
store of torchrun instead of the job's."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

GREETING = b"dglkge-launch 2\n"
RANDOM_BYTES = PROOF_BYTES = 32
HANDSHAKE_SECONDS = 10.0
SHORTEST_SECRET = 16

WRONG_SECRET = f"wrong secret: --secret_file or {SECRET_VARIABLE} must be the same on all nodes"


class RefusedError(InputError):
    """The other side refuses the connection, or is no dglkge-launch."""


def read_secret(path: str | None) -> bytes:
    """Return the secret that all nodes of a job share, of a file or of the variable DGLKGE_SECRET.

    Removes from this process's environment what no process of the job may inherit. Raises InputError if there
    is no secret, it is shorter than SHORTEST_SECRET bytes, or the file cannot be read or is not private.
    """
    text, where = os.environ.get(SECRET_VARIABLE, "").encode(), SECRET_VARIABLE
    for name in NOT_INHERITED:
        os.environ.pop(name, None)
    if path is not None:
        where = path
        with os_errors(InputError, f"cannot read --secret_file {path}"):
            text = read_private(Path(path), "--secret_file")
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
    """Read a file with a secret, which `option` has named; raises InputError if other users can read it.

    Messages do not show the path: it may be a secret that was given in place of a file.
    """
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        if mode & 0o077:
            raise InputError(f"other users can read the file of {option}: its mode is {mode:o}; chmod 600 it")
        return file.read()


def _proof(secret: bytes, role: bytes, random_numbers: bytes) -> bytes:
    """Return the HMAC by which one side proves that it knows the secret."""
    # The role keeps a proof of one side from being sent back as that of the other.
    return hmac.digest(secret, GREETING + role + random_numbers, "sha256")


async def authenticate_node(streams: Streams, secret: bytes) -> None:
    """Check a node that has connected, and prove to it that this is the launcher.

    Raises RefusedError if it does not know the secret, which it has been told; EOFError or OSError if the
    connection is lost.
    """
    (reader, writer), random_number = streams, secrets.token_bytes(RANDOM_BYTES)
    writer.write(GREETING + random_number)
    random_numbers = random_number + await reader.readexactly(RANDOM_BYTES)
    proof = await reader.readexactly(PROOF_BYTES)
    is_right = hmac.compare_digest(proof, _proof(secret, b"node", random_numbers))
    writer.write(_proof(secret, b"launcher", random_numbers) if is_right else bytes(PROOF_BYTES))
    await writer.drain()
    if not is_right:
        raise RefusedError(WRONG_SECRET)


async def authenticate_launcher(streams: Streams, secret: bytes) -> None:
    """Prove to the launcher that this is a node, and check the launcher; raises as the other side does."""
    reader, writer = streams
    greeting = await reader.readexactly(len(GREETING))
    if greeting != GREETING:
        raise RefusedError(f"it is no dglkge-launch of this version (greeting {greeting!r})")
    random_number = secrets.token_bytes(RANDOM_BYTES)
    random_numbers = await reader.readexactly(RANDOM_BYTES) + random_number
    writer.write(random_number + _proof(secret, b"node", random_numbers))
    proof = await reader.readexactly(PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"launcher", random_numbers)):
        raise RefusedError(WRONG_SECRET)


MARK = b"\0dglkge node program 2\n"

HEARTBEAT = "heartbeat"
HEARTBEAT_SECONDS = 2.0
"""Interval of heartbeats in both directions, over streams that may be lost without an end of file."""
HEARTBEAT_TIMEOUT_SECONDS = 12.0
"""Without a message for this time the other end counts as lost."""
LOST_STATUS = 255
"""Exit status of what is lost with its connection; ssh's own."""

STORE_VARIABLE = "DGLKGE_STORE_SOCKET"
"""In a trainer's environment: abstract name of a socket of its node program, for the launcher's store."""

LONGEST_PART_BYTES = 1 << 26
BLOCK_BYTES = 1 << 16
_LENGTHS = struct.Struct("!II")


@dataclass(frozen=True)
class Call:
    """Call of a task of the other end. One without an id gets no reply; those run in their order."""

    task: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    data: bytes = b""
    id: int | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments, with the data if there are any."""
        return {**self.arguments, "data": self.data} if self.data else dict(self.arguments)


@dataclass(frozen=True)
class Reply:
    """Result of a call, or the text of its error; the value is then an operating system's errno or None.

    `is_input`: whether the error is of what the user gave.
    """

    value: Any = None
    error: str | None = None
    is_input: bool = True
    data: bytes = b""
    id: int | None = None

    def check(self, input_kind: type[DglkgeError], other_kind: type[DglkgeError]) -> None:
        """Raise the error, of one of two kinds, if there is any."""
        if self.error is not None:
            raise (input_kind if self.is_input else other_kind)(self.error)


class ProtocolError(OSError):
    """What arrives is no message of this version."""


def encode(message: Call | Reply) -> bytes:
    """Return the frame of a message."""
    fields = {**vars(message)}
    data = fields.pop("data")
    head = json.dumps([type(message).__name__, fields]).encode()
    return _LENGTHS.pack(len(head), len(data)) + head + data


def take_message(received: bytearray) -> Call | Reply | None:
    """Take the first message of what was received; None if it is not complete yet.

    Raises ProtocolError for what is none.
    """
    if len(received) < _LENGTHS.size:
        return None
    head_bytes, data_bytes = _LENGTHS.unpack_from(received)
    if max(head_bytes, data_bytes) > LONGEST_PART_BYTES:
        raise ProtocolError("what arrives is no message")
    start, end = _LENGTHS.size + head_bytes, _LENGTHS.size + head_bytes + data_bytes
    if len(received) < end:
        return None
    head, data = received[_LENGTHS.size : start], bytes(received[start:end])
    del received[:end]
    try:
        name, fields = json.loads(head)
        kinds: dict[str, type[Call] | type[Reply]] = {"Call": Call, "Reply": Reply}
        return kinds[name](**fields, data=data)
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"no message of this version: {error!r}") from None


def answer(call: Call, tasks: Mapping[str, Callable[..., Any]]) -> Reply:
    """Run the task of a call; its error, a defect too, is a reply.

    A task whose reply has data returns a tuple of the value and the data.
    """
    try:
        result = tasks[call.task](**call.keywords)
        value, data = result if isinstance(result, tuple) else (result, b"")
        return Reply(value, data=data)
    except DglkgeError as error:
        return Reply(error=str(error), is_input=not isinstance(error, NotReadyError))
    except OSError as error:
        return Reply(error.errno, error=f"{call.task} failed: {error.strerror or error}")
    except Exception as error:
        return Reply(error=f"{call.task} failed: {error!r}")


Answer = Callable[[Call], Awaitable[Reply]]
"""Runs a call with a reply, beside others."""
Handlers = Mapping[str, Callable[..., Awaitable[None]]]
"""Run the calls without a reply, one after the other, by their tasks."""


class Peer:
    """One end of a stream, which calls tasks of the other end and runs what that calls.

    After `heartbeat_timeout` seconds without a byte the other end counts as lost; None: never, since the
    stream always reaches its end.
    """

    def __init__(self, streams: Streams, heartbeat_timeout: float | None = None) -> None:
        self._reader, self.writer = streams
        self.heartbeat_timeout = heartbeat_timeout
        self.is_alive = True
        self._received = bytearray()
        self._replies: dict[int | None, asyncio.Future[Reply | None]] = {}
        self._numbers = itertools.count()

    async def serve(self, answer: Answer, handlers: Handlers, awaits_mark: bool = False) -> None:
        """Run what the other end calls, to the end of the stream; send heartbeats if they have a timeout.

        The present timeout holds until the mark. Raises asyncio.TimeoutError after it, OSError if the stream
        is broken.
        """
        heartbeats = asyncio.ensure_future(self._send_heartbeats())
        try:
            if awaits_mark:
                await self._skip_to_mark()
                self.heartbeat_timeout = self.heartbeat_timeout and HEARTBEAT_TIMEOUT_SECONDS
            while True:
                message = await self.receive()
                if isinstance(message, Reply):
                    self._resolve(message.id, message)
                elif message.id is not None:
                    spawn(self._answer(message, answer))
                elif message.task != HEARTBEAT:
                    await handlers[message.task](**message.keywords)
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"no call of this version: {error!r}") from None
        except EOFError:
            pass
        finally:
            heartbeats.cancel()
            self.is_alive = False
            for number in self._replies:
                self._resolve(number, None)

    async def request(self, call: Call) -> Reply | None:
        """Make a call; return its reply, None if the stream ends before."""
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(dataclasses.replace(call, id=number))
            return await reply if self.is_alive else None
        finally:
            del self._replies[number]

    def tell(self, task: str, **arguments: Any) -> None:
        """Make a call without a reply; ``data`` are bytes."""
        self.send(Call(task, data=arguments.pop("data", b""), arguments=arguments))

    def send(self, message: Call | Reply) -> None:
        """Queue a message; whoever receives finds the end of the stream."""
        if not self.writer.is_closing():
            self.writer.write(encode(message))

    async def drain(self) -> None:
        """Wait while too much is queued; ignores a lost stream."""
        with contextlib.suppress(OSError):
            await self.writer.drain()

    async def receive(self) -> Call | Reply:
        """Return the next message; raises as :meth:`serve` does, and EOFError at the end of the stream."""
        while (message := take_message(self._received)) is None:
            await self._read()
        return message

    async def _skip_to_mark(self) -> None:
        while MARK not in self._received:
            del self._received[: -len(MARK)]
            await self._read()
        del self._received[: self._received.index(MARK) + len(MARK)]

    async def _read(self) -> None:
        """Add some more bytes to those received."""
        data = await asyncio.wait_for(self._reader.read(BLOCK_BYTES), self.heartbeat_timeout)
        if not data:
            raise EOFError("the connection ended")
        self._received += data

    def _resolve(self, number: int | None, reply: Reply | None) -> None:
        """Give a request its reply, unless it has timed out."""
        request = self._replies.get(number)
        if request is not None and not request.done():
            request.set_result(reply)

    async def _answer(self, call: Call, answer: Answer) -> None:
        """Run a call and send its reply; heartbeats and output go on meanwhile."""
        self.send(dataclasses.replace(await answer(call), id=call.id))

    async def _send_heartbeats(self) -> None:
        while self.heartbeat_timeout:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self.tell(HEARTBEAT)
