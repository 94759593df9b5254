"""The launcher's end of a node program: calls of its tasks, and the processes that it runs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, cast

from dglkge.errors import InputError, NotReadyError
from dglkge.launch.process_plan import PlannedProcess
from dglkge.launch.protocol import (
    BLOCK_BYTES,
    HEARTBEAT_SECONDS,
    HEARTBEAT_TIMEOUT_SECONDS,
    LOST_STATUS,
    MARK,
    Call,
    Decoder,
    Ended,
    Gone,
    Heartbeat,
    Message,
    Output,
    Reply,
    Signal,
    Start,
    Started,
    StopRequest,
    encode,
)
from dglkge.launch.ssh import STARTER, SshSettings, python_from_stdin, ssh_command

NEVER_STARTED_STATUS = 127
START_SECONDS = 30.0
"""Time until the first message of a node program on another machine: SSH has to connect before."""

REPLY_SECONDS = 30.0
LEAVE_SECONDS = 2.0
CANCEL_POLL_SECONDS = 0.5
CANCELLED = "the transfer was cancelled"
MOST_EVENTS = 1024
"""Messages of processes that wait to be processed; then processes that print more are blocked."""


class Events:
    """Queue of messages of processes, until it is closed."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[RunningProcess, Message]] = queue.Queue(MOST_EVENTS)
        self._is_closed = False

    def put(self, process: RunningProcess, message: Message) -> None:
        """Add a message; blocks while the queue is full."""
        while not self._is_closed:
            with contextlib.suppress(queue.Full):
                self._queue.put((process, message), timeout=HEARTBEAT_SECONDS)
                return

    def take(self, seconds: float) -> list[tuple[RunningProcess, Message]]:
        """Return what is there; wait for `seconds` if there is nothing."""
        taken = []
        with contextlib.suppress(queue.Empty):
            taken.append(self._queue.get(timeout=seconds) if seconds > 0 else self._queue.get_nowait())
            while len(taken) < MOST_EVENTS:
                taken.append(self._queue.get_nowait())
        return taken

    def close(self) -> None:
        """Drop further messages."""
        self._is_closed = True


class RunningProcess:
    """A planned process, run by a node program.

    Parameters
    ----------
    planned : PlannedProcess
    connection : NodeConnection
        Of its machine.
    number : int
        By which the node program knows it.
    events : Events
        Gets its messages.

    Attributes
    ----------
    pid : int or None
        Number of the process on its machine; None until it is reported.
    status : int or None
        None while it runs; then its exit status, or minus the number of the signal that ended it.
    ended_at : float
        Time of its end by its own machine's clock, in seconds since the epoch.
    reported_at : float
        Time at which the launcher received the report of the end, by the launcher's monotonic clock.
    error : str or None
        Reason why it could not be started or was lost.
    is_gone : bool
        Whether it has ended with all its descendants.
    """

    def __init__(
        self, planned: PlannedProcess, connection: NodeConnection, number: int, events: Events
    ) -> None:
        self.planned = planned
        self.number = number
        self.events = events
        self.pid: int | None = None
        self.status: int | None = None
        self.ended_at = 0.0
        self.reported_at = 0.0
        self.error: str | None = None
        self.is_gone = False
        self._connection = connection

    def send_signal(self, number: int) -> None:
        """Request a signal to the process; SIGKILL goes to all its descendants too."""
        self._connection.send(Signal(self.number, number))

    def apply(self, message: Message) -> None:
        """Take over what a message of the node program tells."""
        if isinstance(message, Started):
            self.pid = message.pid
        elif isinstance(message, Ended):
            self.status, self.ended_at, self.reported_at = message.status, message.time, time.monotonic()
        elif isinstance(message, Gone):
            self.is_gone = True
            if self.status is None:
                self.error, self.reported_at = message.error, time.monotonic()
                self.status = NEVER_STARTED_STATUS if self.pid is None else LOST_STATUS


class Stream(Protocol):
    """Way to a node program."""

    def fileno(self) -> int:
        """Return the descriptor to read from."""
        ...

    def write(self, data: memoryview) -> int:
        """Write some bytes; return how many."""
        ...

    def close(self) -> None:
        """End the stream, at whose end the node program exits."""
        ...

    def kill(self) -> None:
        """End the stream at once, from any thread."""
        ...

    def describe_end(self) -> str:
        """Describe why the stream has ended."""
        ...


class ChildStream:
    """Pipes of a node program on this machine (without ssh), or of the ssh client that leads to another.

    Parameters
    ----------
    address : str
        As in ip_config.txt.
    ssh : SshSettings or None
        None: this machine.
    python : str
        The interpreter there.
    environment : mapping of str to str
        Added to the environment there.

    Raises
    ------
    NotReadyError
        If there is no client here, or `python` cannot be started here.
    """

    def __init__(
        self, address: str, ssh: SshSettings | None, python: str, environment: Mapping[str, str]
    ) -> None:
        self._address = address
        self._ssh = ssh
        self._python = python
        # A file and not a pipe: a full pipe that is not read would block ssh.
        self._errors = tempfile.TemporaryFile()
        self._process = self._start(environment)

    def _start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the node program, or the ssh client that leads to it."""
        if self._ssh is None:
            # This package's folder, since the launcher may run from sources, but not the working folder. No
            # heartbeats: a pipe on one machine always reaches its end.
            folder = str(Path(__file__).resolve().parents[2])
            program = f"import sys; sys.path = [*filter(None, sys.path), {folder!r}]; "
            program += "import dglkge.launch.node_program as node; node.main(0)"
            command, first = [self._python, "-c", program], b""
        else:
            command = ssh_command(self._ssh, self._address, python_from_stdin(self._python, STARTER))
            program_there = [self._python, "-m", "dglkge.launch.node_program"]
            first = STARTER + json.dumps([program_there, dict(environment)]).encode() + b"\n"
        try:
            # A session of its own: Ctrl-C in the terminal must reach the launcher only, which forwards it.
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment} if self._ssh is None else None,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise NotReadyError(self._describe_missing(command[0], error)) from None
        with contextlib.suppress(OSError):
            cast(IO[bytes], process.stdin).write(first)
        return process

    def fileno(self) -> int:
        """Return the descriptor of its stdout."""
        return cast(IO[bytes], self._process.stdout).fileno()

    def write(self, data: memoryview) -> int:
        """Write to its stdin."""
        return cast(IO[bytes], self._process.stdin).write(data) or 0

    def close(self) -> None:
        """Close stdin; kill the node program after LEAVE_SECONDS."""
        with contextlib.suppress(OSError):
            cast(IO[bytes], self._process.stdin).close()
        # Time for the node program to clean up, before the connection is killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)
        self.kill()
        self._process.wait()

    def kill(self) -> None:
        """Kill the client and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def describe_end(self) -> str:
        """Describe why there is no node program, by the last line of ssh, the shell or Python."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)
        status = self._process.returncode or 0
        if self._ssh is not None and status < 0:
            return f"its ssh client was killed by {signal.Signals(-status).name}"
        # The last line: before it ssh or a login shell may print banners.
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        words = lines[-1].strip() if lines else f"status {status}"
        if self._ssh is not None and status == LOST_STATUS:
            return f"cannot be reached by ssh: {words}"
        if "No module named" in words:
            return f"dglkge must be installed for {self._python} there: {words}"
        return f"{self._python} could not run there: {words}"

    def _describe_missing(self, program: str, error: OSError) -> str:
        """Describe a program that could not be started on the launcher's machine, with a remedy."""
        if self._ssh is None:
            return (
                f"{self._address}, the launcher's machine: cannot start {program}: {error.strerror}; "
                "give the path of another interpreter with --python"
            )
        return (
            f"the launcher's machine cannot start {program!r}, which reaches {self._address}: "
            f"{error.strerror}; install OpenSSH's client"
        )


class SocketStream:
    """An authenticated connection to a node program, which has connected by itself."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._connection.fileno()

    def write(self, data: memoryview) -> int:
        """Send some bytes."""
        return self._connection.send(data)

    def close(self) -> None:
        """End the connection; a node that was not told the end of the job counts the launcher as lost."""
        self.kill()

    def kill(self) -> None:
        """End the connection, also under a thread that reads from it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def describe_end(self) -> str:
        """Describe the end."""
        return "the connection ended"


def open_node(
    address: str,
    ssh: SshSettings | None,
    python: str,
    environment: Mapping[str, str],
    on_stop: Callable[[int], None] = lambda number: None,
) -> NodeConnection:
    """Start a node program, and connect to it; see :class:`ChildStream` and :class:`NodeConnection`."""
    stream = ChildStream(address, ssh, python, environment)
    return NodeConnection(address, stream, is_here=ssh is None, on_stop=on_stop)


class NodeConnection:
    """Connection to a node program.

    A thread reads what arrives, and sends heartbeats.

    Parameters
    ----------
    address : str
        As in ip_config.txt.
    stream : Stream
    is_here : bool
        Whether the node program is a child of this process: its stream always reaches an end of file.
    environment : mapping of str to str, optional
        Added to the environment of processes there.
    on_stop : callable, optional
        Called with the number of a stop signal that the node program has received; in the thread.
    on_lost : callable, optional
        Called with the reason when the stream has ended; in the thread.
    received : bytes, optional
        Bytes that were read from the stream before.
    """

    def __init__(
        self,
        address: str,
        stream: Stream,
        *,
        is_here: bool = False,
        environment: Mapping[str, str] | None = None,
        on_stop: Callable[[int], None] = lambda number: None,
        on_lost: Callable[[str], None] = lambda why: None,
        received: bytes = b"",
    ) -> None:
        self.address = address
        self.is_here = is_here
        self.is_borrowed = isinstance(stream, SocketStream)
        self.is_cut = False
        self.is_alive = True
        self._stream = stream
        self._environment = dict(environment or {})
        self._on_stop = on_stop
        self._on_lost = on_lost
        self._num_stops = 0
        self._replies: dict[int, queue.SimpleQueue[Reply | None]] = {}
        self._processes: dict[int, RunningProcess] = {}
        self._numbers = itertools.count()
        self._why: str | None = None
        self._changed = threading.Lock()
        # Messages come from different threads; a frame must not be split.
        self._writing = threading.Lock()
        self._reader = threading.Thread(
            target=self._read, args=(received,), daemon=True, name=f"dglkge-node-{address}"
        )
        self._reader.start()

    def call(
        self,
        task: str,
        seconds: float = REPLY_SECONDS,
        is_cancelled: Callable[[], bool] = lambda: False,
        /,
        **arguments: Any,
    ) -> Any:
        """Call a task of the node program and return its result.

        Parameters
        ----------
        task : str
            One of :func:`dglkge.launch.node_tasks.node_tasks`.
        seconds : float
            Timeout.
        is_cancelled : callable
            Whether to wait no longer.
        **arguments
            Of the task; any names, ``seconds`` included. ``data`` are bytes.

        Raises
        ------
        InputError
            Error of the task; a NotReadyError if it is none of the user's input, the node program has ended,
            or does not reply in time.
        """
        return self.call_for_data(task, seconds, is_cancelled, **arguments)[0]

    def call_for_data(
        self, task: str, seconds: float, is_cancelled: Callable[[], bool], /, **arguments: Any
    ) -> tuple[Any, bytes]:
        """As :meth:`call`; return the bytes that belong to the result as well."""
        replies: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        number = next(self._numbers)
        deadline = time.monotonic() + seconds
        with self._changed:
            is_alive = self.is_alive
            self._replies[number] = replies
        try:
            data = arguments.pop("data", b"")
            if is_alive:
                self.send(Call(number, task, arguments, data))
            while is_alive and not is_cancelled():
                left = deadline - time.monotonic()
                with contextlib.suppress(queue.Empty):
                    reply = replies.get(timeout=max(0.0, min(left, CANCEL_POLL_SECONDS)))
                    break
                if left <= 0:
                    raise NotReadyError(f"did not answer within {seconds:g} s")
            else:
                reply = None
        finally:
            with self._changed:
                del self._replies[number]
        if reply is None:
            is_given_up = self.is_cut or is_cancelled()
            raise InputError(CANCELLED) if is_given_up else NotReadyError(self.describe_end())
        if reply.error is not None:
            raise (InputError if reply.is_input else NotReadyError)(reply.error)
        return reply.value, reply.data

    def start(self, planned: PlannedProcess, folder: str, events: Events) -> RunningProcess:
        """Start a process there; `events` gets its messages."""
        process = RunningProcess(planned, self, next(self._numbers), events)
        with self._changed:
            is_alive = self.is_alive
            self._processes[process.number] = process
        if is_alive:
            environment = {**self._environment, **planned.environment}
            self.send(Start(process.number, list(planned.command), environment, folder))
        else:
            events.put(process, Gone(process.number, self.describe_end()))
        return process

    def send(self, message: Message) -> None:
        """Send a message; a closed stream is ignored here, as the thread finds its end."""
        with self._writing, contextlib.suppress(OSError, ValueError):
            self._write(encode(message))

    def close(self) -> None:
        """Close the stream, at whose end the node program exits."""
        self._stream.close()
        self._reader.join()

    def cut(self) -> None:
        """Cancel calls and transfers, from any thread. A node program on another machine goes on."""
        self.is_cut = True
        with self._changed:
            for replies in self._replies.values():
                replies.put(None)

    @property
    def is_silent(self) -> bool:
        """Whether the connection was given up without an answer: the machine may be off."""
        return self._why is not None

    def describe_end(self) -> str:
        """Describe why there is no node program."""
        return self._why or self._stream.describe_end()

    def _read(self, received: bytes) -> None:
        """Process messages to the end of the stream; the body of the thread."""
        decoder = Decoder(MARK)
        limit = START_SECONDS
        last_received = last_sent = time.monotonic()
        with contextlib.suppress(OSError, ValueError):
            data = received
            while True:
                for message in decoder.feed(data):
                    limit = HEARTBEAT_TIMEOUT_SECONDS
                    self._dispatch(message)
                data = b""
                if select.select([self._stream], [], [], None if self.is_here else HEARTBEAT_SECONDS)[0]:
                    data = os.read(self._stream.fileno(), BLOCK_BYTES)
                    if not data:
                        break
                    last_received = time.monotonic()
                now = time.monotonic()
                if not self.is_here and now - last_received > limit:
                    self._why = f"no heartbeat for {limit:g} s"
                    break
                if not self.is_here and now - last_sent >= HEARTBEAT_SECONDS:
                    last_sent = now
                    self._send_heartbeat()
        self._stream.kill()
        self._lose()

    def _send_heartbeat(self) -> None:
        """Send a heartbeat, unless another thread is writing, which is one as well."""
        if self._writing.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError, ValueError):
                    self._write(encode(Heartbeat()))
            finally:
                self._writing.release()

    def _write(self, data: bytes) -> None:
        """Write all bytes; under the lock."""
        view = memoryview(data)
        # An unbuffered write may accept fewer bytes than given.
        while view:
            view = view[self._stream.write(view) :]

    def _dispatch(self, message: Message) -> None:
        """Pass a message on to who waits for it."""
        if isinstance(message, Reply):
            with self._changed:
                replies = self._replies.get(message.id)
            if replies is not None:  # else the call has timed out
                replies.put(message)
        elif isinstance(message, StopRequest):
            self._num_stops += 1
            if self._num_stops > 1:
                self._why = f"stopped by a second signal, {signal.Signals(message.number).name}"
            self._on_stop(message.number)
        elif isinstance(message, (Started, Output, Ended, Gone)):
            with self._changed:
                process = self._processes.get(message.process)
                if isinstance(message, Gone):
                    self._processes.pop(message.process, None)
            if process is not None:
                process.events.put(process, message)

    def _lose(self) -> None:
        """Tell all who wait that the stream has ended."""
        with self._changed:
            self.is_alive = False
            for replies in self._replies.values():
                replies.put(None)
            processes = list(self._processes.values())
            self._processes.clear()
        why = self._why or ("its node program was killed" if self.is_here else "the connection ended")
        self._on_lost(why)
        for process in processes:
            process.events.put(process, Gone(process.number, why))


def close_all(connections: Sequence[NodeConnection]) -> None:
    """Close connections in parallel."""
    threads = [threading.Thread(target=connection.close) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
