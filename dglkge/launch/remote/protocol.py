"""Messages between the launcher and the node program of a machine, over one stream in each direction.

A frame is the length of its head and of its data (4 bytes each, big-endian), the head in JSON, the data. The
node program sends :data:`MARK` first: what comes before it is output of a login shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from dglkge.errors import DglkgeError, NotReadyError

MARK = b"\0dglkge node program 1\n"

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
class Heartbeat:
    """Sign of life, of both ends."""


@dataclass(frozen=True)
class Call:
    """The launcher calls a task of the node program, or a trainer there one of the launcher's store.

    Replies come in any order.
    """

    id: int
    task: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    data: bytes = b""


@dataclass(frozen=True)
class Reply:
    """Result of a call, or the text of its error; the value is then an operating system's errno or None.

    `is_input`: whether the error is of what the user gave.
    """

    id: int
    value: Any = None
    error: str | None = None
    is_input: bool = True
    data: bytes = b""

    def check(self, input_kind: type[DglkgeError], other_kind: type[DglkgeError]) -> None:
        """Raise the error, of one of two kinds, if there is any."""
        if self.error is not None:
            raise (input_kind if self.is_input else other_kind)(self.error)


@dataclass(frozen=True)
class Prepare:
    """The launcher will start processes of one command: a fork server imports what they need."""

    command: list[str]
    environment: Mapping[str, str]
    folder: str
    num_processes: int


@dataclass(frozen=True)
class Start:
    """The launcher starts a process, by which number it is known from here on."""

    process: int
    command: list[str]
    environment: Mapping[str, str]
    folder: str


@dataclass(frozen=True)
class Signal:
    """The launcher sends a signal to a process; SIGKILL goes to all its descendants too."""

    process: int
    number: int


@dataclass(frozen=True)
class Started:
    """A process runs."""

    process: int
    pid: int


@dataclass(frozen=True)
class Output:
    """Output of a process and its descendants, stderr included."""

    process: int
    data: bytes


@dataclass(frozen=True)
class Ended:
    """A process has ended: its status, or minus the signal's number, and the time by the node's clock."""

    process: int
    status: int
    time: float


@dataclass(frozen=True)
class Gone:
    """All descendants of a process have ended too; `error`: why it could not be started or was lost."""

    process: int
    error: str | None = None


@dataclass(frozen=True)
class StopRequest:
    """The node program has received a stop signal."""

    number: int


@dataclass(frozen=True)
class JobEnd:
    """The job has ended; a node program that has connected by itself exits with its status."""

    status: int
    reason: str = ""


Message = (
    Heartbeat | Call | Reply | Prepare | Start | Signal | Started | Output | Ended | Gone | StopRequest
    | JobEnd
)  # fmt: skip
_KINDS: dict[str, Callable[..., Message]] = {kind.__name__: kind for kind in get_args(Message)}


class ProtocolError(OSError):
    """What arrives is no message of this version."""


def encode(message: Message) -> bytes:
    """Return the frame of a message."""
    fields = {item.name: getattr(message, item.name) for item in dataclasses.fields(message)}
    data = fields.pop("data", b"")
    head = json.dumps([type(message).__name__, fields]).encode()
    return _LENGTHS.pack(len(head), len(data)) + head + data


class Decoder:
    """Splits a stream into messages; drops all bytes up to a mark, and it."""

    def __init__(self, mark: bytes = b"") -> None:
        self._mark = mark
        self._received = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that some more bytes complete; raises ProtocolError for what is none."""
        self._received += data
        if self._mark:
            before, mark, after = bytes(self._received).partition(self._mark)
            if not mark:
                del self._received[: -len(self._mark)]
                return []
            self._mark, self._received = b"", bytearray(after)
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _next(self) -> Message | None:
        """Take the first message; None if it is not complete."""
        if len(self._received) < _LENGTHS.size:
            return None
        head_bytes, data_bytes = _LENGTHS.unpack_from(self._received)
        if max(head_bytes, data_bytes) > LONGEST_PART_BYTES:
            raise ProtocolError("what arrives is no message")
        end = _LENGTHS.size + head_bytes
        if len(self._received) < end + data_bytes:
            return None
        head, data = bytes(self._received[_LENGTHS.size : end]), bytes(self._received[end : end + data_bytes])
        del self._received[: end + data_bytes]
        try:
            name, fields = json.loads(head)
            if data:
                fields["data"] = data
            return _KINDS[name](**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"no message of this version: {error!r}") from None


def answer(call: Call, tasks: Mapping[str, Callable[..., Any]]) -> Reply:
    """Run the task of a call; its error, a defect too, is a reply.

    A task whose reply has data returns a tuple of the value and the data.
    """
    try:
        more = {"data": call.data} if call.data else {}
        result = tasks[call.task](**call.arguments, **more)
        value, data = result if isinstance(result, tuple) else (result, b"")
        return Reply(call.id, value, data=data)
    except DglkgeError as error:
        return Reply(call.id, error=str(error), is_input=not isinstance(error, NotReadyError))
    except OSError as error:
        return Reply(call.id, error.errno, error=error.strerror or str(error))
    except Exception as error:
        return Reply(call.id, error=f"{call.task} failed: {error!r}")


class Stream:
    """Messages in both directions of a connection.

    After `heartbeat_timeout` seconds without a message the other end counts as lost; None: never, since the
    stream always reaches its end. May be changed.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        heartbeat_timeout: float | None = None,
    ) -> None:
        self.writer = writer
        self.heartbeat_timeout = heartbeat_timeout
        self._reader = reader

    async def receive(self, mark: bytes = b"") -> AsyncIterator[Message]:
        """Yield the messages after a mark, to the end of the stream.

        Raises asyncio.TimeoutError after the heartbeat's timeout, OSError if the stream is broken.
        """
        decoder = Decoder(mark)
        while data := await asyncio.wait_for(self._reader.read(BLOCK_BYTES), self.heartbeat_timeout):
            for message in decoder.feed(data):
                yield message

    def send(self, message: Message) -> None:
        """Queue a message; whoever receives finds the end of the stream."""
        if not self.writer.is_closing():
            self.writer.write(encode(message))

    async def drain(self) -> None:
        """Wait while too much is queued; ignores a lost stream."""
        with contextlib.suppress(OSError):
            await self.writer.drain()

    async def send_heartbeats(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self.send(Heartbeat())
