"""The launcher's end of a node program: its start over ssh, calls of its tasks, the processes that it runs.

No user input passes through a shell: the remote command line is an interpreter and one fixed line of Python,
and everything else (program, arguments, variables) follows over stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import functools
import itertools
import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dglkge.errors import InputError, NotReadyError, os_errors
from dglkge.launch.background import in_thread, launcher_loop, wait
from dglkge.launch.process_plan import TRAINER, PlannedProcess, common_environment
from dglkge.launch.remote import protocol

NEVER_STARTED_STATUS = 127
START_SECONDS = 30.0
"""Time until the first message of a node program on another machine: SSH has to connect before."""

REPLY_SECONDS = 30.0
LEAVE_SECONDS = 2.0
POLL_SECONDS = 0.02
MOST_EVENTS = 1024
"""Changes of processes that wait to be processed; then processes that print more are blocked."""

Changes = Mapping[str, Any]
"""What a node program tells of a process: ``data``, its output, or fields of :class:`RunningProcess`."""


class Events:
    """Queue of changes of processes, until it is closed."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[RunningProcess, Changes]] = queue.Queue(MOST_EVENTS)
        self._is_closed = False

    async def put(self, process: RunningProcess, changes: Changes) -> None:
        """Add changes of a process; waits while the queue is full."""
        while not self._is_closed:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait((process, changes))
                return
            await asyncio.sleep(POLL_SECONDS)

    def take(self, seconds: float) -> list[tuple[RunningProcess, Changes]]:
        """Return what is there; wait for `seconds` if there is nothing."""
        taken = []
        with contextlib.suppress(queue.Empty):
            taken.append(self._queue.get(timeout=seconds))
            while len(taken) < MOST_EVENTS:
                taken.append(self._queue.get_nowait())
        return taken

    def close(self) -> None:
        """Drop further messages."""
        self._is_closed = True


@dataclass(eq=False)
class RunningProcess:
    """A planned process, run by a node program.

    Attributes
    ----------
    number : int
        By which the node program knows it.
    pid : int or None
        None until it is reported.
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

    planned: PlannedProcess
    connection: NodeConnection
    number: int
    events: Events
    pid: int | None = None
    status: int | None = None
    ended_at: float = 0.0
    reported_at: float = 0.0
    error: str | None = None
    is_gone: bool = False

    @property
    def name(self) -> str:
        """Name for messages, e.g. ``trainer 1``."""
        return self.planned.name

    @property
    def is_trainer(self) -> bool:
        """Whether it is a trainer, not a server."""
        return self.planned.role == TRAINER

    def describe(self) -> str:
        """Return name, pid and machine for messages."""
        pid = f" (pid {self.pid})" if self.pid is not None else ""
        return f"{self.name}{pid} on {self.planned.address}"

    def send_signal(self, number: int) -> None:
        """Request a signal to the process, from any thread; SIGKILL goes to all its descendants too."""
        tell = functools.partial(self.connection.tell, "signal", process=self.number, number=number)
        launcher_loop().call_soon_threadsafe(tell)

    def apply(self, is_gone: bool = False, error: str | None = None, **fields: Any) -> None:
        """Take over what the node program tells; `fields` are the pid, or the status and its time."""
        vars(self).update(fields)
        if "status" in fields:
            self.reported_at = time.monotonic()
        if is_gone:
            self.is_gone = True
            if self.status is None:
                self.error, self.reported_at = error, time.monotonic()
                self.status = NEVER_STARTED_STATUS if self.pid is None else protocol.LOST_STATUS


FORWARDED_VARIABLES = (
    "CONDA_*", "CUDA_*", "DGL*", "GLOO_*", "GOMP_*", "HDF5_*", "KMP_*", "LANG", "LANGUAGE", "LC_*",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*", "MKL_*", "NCCL_*", "NUMBA_*", "OMP_*", "OPENBLAS_*", "PATH",
    "PYTHON*", "TORCH_*", "TP_*", "TZ", "VIRTUAL_ENV",
)  # fmt: skip
"""Patterns of names; --extra_envs forwards any other."""

SEARCH_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that are forwarded to other machines.

    Relative folders of search paths are made absolute: processes elsewhere start in other folders.
    """
    picked = {}
    for name, value in environment.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in FORWARDED_VARIABLES):
            folders = value.split(os.pathsep) if name in SEARCH_PATHS else []
            absolute = [os.path.abspath(folder) if folder else folder for folder in folders]
            picked[name] = os.pathsep.join(absolute) or value
    picked.pop(protocol.SECRET_VARIABLE, None)
    return picked


SSH_DEFAULTS = (
    "BatchMode=yes",  # ssh must fail and not ask for a password, which no user could enter
    "ConnectTimeout=10", "ServerAliveInterval=3", "ServerAliveCountMax=4", "LogLevel=ERROR",
    "ControlMaster=no", "ControlPath=none",  # a shared connection serves 10 processes at most (MaxSessions)
)  # fmt: skip
"""A connection is closed after 12 s without a reply."""


def ssh_client(flags: Mapping[str, object], options: Sequence[str] = ()) -> list[str]:
    """Return the command of ssh without the machine.

    A flag whose value is None is left out. `options` are ``KEY=VALUE`` of ssh_config(5); they win over those
    of this module.
    """
    command = ["ssh", "-T", "-x"]
    # ssh uses the first value of a repeated option
    for option in (*options, *SSH_DEFAULTS):
        command += ["-o", option]
    for flag, value in flags.items():
        if value is not None:
            command += [flag, str(value)]
    return command


STARTER = (
    'import json,os;line=open(0,"rb",0,closefd=False).readline();line or os._exit(1);'
    'command,environment=json.loads(line);os.chdir("/");'
    "os.execve(command[0],command,{**os.environ,**environment})"
)
"""Program that sets an environment and becomes another program, given as a line of JSON; the rest of stdin is
that program's. Without a line the launcher is gone. In ``/``: a folder named dglkge in the home folder would
be imported as the package. One line without quotes that a login shell may treat in its own way."""


class ChildProgram:
    """A node program that is a child of this process, or the ssh client that leads to one elsewhere.

    It gets the variables of this process that :func:`forwarded_environment` selects.

    Parameters
    ----------
    address : str
        As in ip_config.txt.
    ssh : sequence of str or None
        Command of the client, as :func:`ssh_client` returns it; None: this machine.
    python : str
        The interpreter there.

    Raises
    ------
    NotReadyError
        If there is no client here, or `python` cannot be started here.
    """

    def __init__(self, address: str, ssh: Sequence[str] | None, python: str) -> None:
        self.ssh = ssh
        self._python = python
        environment = forwarded_environment(os.environ)
        # A file and not a pipe: a full pipe that is not read would block ssh.
        self._errors = tempfile.TemporaryFile()
        if ssh is None:
            # This package's folder, since the launcher may run from sources, but not the working folder. No
            # heartbeats: a socket pair on one machine always reaches its end.
            folder = str(Path(__file__).resolve().parents[3])
            program = f"import sys; sys.path = [*filter(None, sys.path), {folder!r}]; "
            program += "import dglkge.launch.node_program as node; node.main(None)"
            command, variables, first = [python, "-c", program], {**os.environ, **environment}, b""
            what = f"{address}, the launcher's machine: cannot start {python} (--python gives another)"
        else:
            # Each word is quoted for the shell there.
            command = [*ssh, "--", address, shlex.join([python, "-I", "-S", "-c", STARTER])]
            program_there = [python, "-m", "dglkge.launch.node_program"]
            variables, first = None, json.dumps([program_there, environment]).encode() + b"\n"
            what = f"the launcher's machine cannot start 'ssh', which reaches {address} (install OpenSSH)"
        self.socket, child_socket = socket.socketpair()
        pipe = child_socket.fileno()
        with child_socket, os_errors(NotReadyError, what):
            # A session of its own: Ctrl-C in the terminal must reach the launcher only, which forwards it.
            self._process = subprocess.Popen(
                command, env=variables, stdin=pipe, stdout=pipe, stderr=self._errors, start_new_session=True
            )
        with contextlib.suppress(OSError):
            self.socket.sendall(first)

    async def await_end(self) -> None:
        """Wait for its end, for LEAVE_SECONDS at most, which it has to clean up."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """Kill it and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def describe_end(self) -> str:
        """Describe why there is no node program, by the last line of ssh, the shell or Python."""
        await self.await_end()
        status = self._process.returncode or 0
        if self.ssh is not None and status < 0:
            return f"its ssh client was killed by {signal.Signals(-status).name}"
        # The last line: before it ssh or a login shell may print banners.
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        words = lines[-1].strip() if lines else f"status {status}"
        if self.ssh is not None and status == protocol.LOST_STATUS:
            return f"cannot be reached by ssh: {words}"
        if "No module named" in words:
            return f"dglkge must be installed for {self._python} there: {words}"
        return f"{self._python} could not run there: {words}"


def open_node(address: str, ssh: Sequence[str] | None, python: str) -> NodeConnection:
    """Start a node program, and connect to it; see :class:`ChildProgram` and :class:`NodeConnection`."""
    # Here and not on the loop: a child inherits the cores of the thread that starts it.
    child = ChildProgram(address, ssh, python)

    async def connect() -> NodeConnection:
        return NodeConnection(address, await asyncio.open_connection(sock=child.socket), child)

    return wait(connect())


class NodeConnection(protocol.Peer):
    """Connection to a node program; its coroutines run on the launcher's loop.

    Parameters
    ----------
    address : str
        As in ip_config.txt.
    streams : tuple
        Reader and writer.
    child : ChildProgram, optional
        At the other end; None: a node program that has connected by itself.

    Attributes
    ----------
    on_stop : callable
        Called with the number of a stop signal that the node program has received.
    on_lost : callable
        Called with the reason when the stream has ended.
    store : callable
        Answers requests that trainers there send to the launcher's store; see
        :class:`dglkge.launch.remote.run_store.RunFolder`.
    """

    def __init__(self, address: str, streams: protocol.Streams, child: ChildProgram | None = None) -> None:
        self.is_here = child is not None and child.ssh is None
        super().__init__(streams, None if self.is_here else START_SECONDS)
        self.address, self.is_borrowed = address, child is None
        self.on_stop: Callable[[int], None] = lambda number: None
        self.on_lost: Callable[[str], None] = lambda why: None
        no_store = protocol.Reply(error="this job's launcher holds no store")
        self.store: Callable[[protocol.Call], protocol.Reply] = lambda _: no_store
        self._child = child
        self._processes: dict[int, RunningProcess] = {}
        self._process_numbers = itertools.count()
        self.why_silent: str | None = None
        """Why the connection was given up without an answer: the machine may be off."""
        self._serving = asyncio.create_task(self._serve())

    async def call(self, task: str, seconds: float = REPLY_SECONDS, /, **arguments: Any) -> Any:
        """Call one of :func:`dglkge.launch.machine.node_tasks` and return its result; ``data`` are bytes.

        Raises
        ------
        InputError
            Error of the task; a NotReadyError if it is none of the user's input, the node program has ended,
            or does not reply in time.
        """
        return (await self.call_for_data(task, seconds, **arguments))[0]

    async def call_for_data(self, task: str, seconds: float, /, **arguments: Any) -> tuple[Any, bytes]:
        """As :meth:`call`; return the bytes that belong to the result as well."""
        call = protocol.Call(task, data=arguments.pop("data", b""), arguments=arguments)
        try:
            reply = await asyncio.wait_for(self.request(call), seconds)
        except asyncio.TimeoutError:
            raise NotReadyError(f"did not answer within {seconds:g} s") from None
        if reply is None:
            raise NotReadyError(await self.describe_end())
        reply.check(InputError, NotReadyError)
        return reply.value, reply.data

    async def start(self, plan: Sequence[PlannedProcess], cwd: str, events: Events) -> list[RunningProcess]:
        """Start processes of one command there, in a working folder; `events` gets their changes."""
        processes = [RunningProcess(planned, self, next(self._process_numbers), events) for planned in plan]
        self._processes |= {process.number: process for process in processes}
        if self.is_alive:
            command, environment = list(plan[0].command), common_environment(plan)
            requests = [(process.number, process.planned.environment) for process in processes]
            self.tell("start", command=command, environment=environment, folder=cwd, processes=requests)
        else:
            why = await self.describe_end()
            for process in processes:
                await self._change(process.number, is_gone=True, error=why)
        return processes

    async def close(self) -> None:
        """Close the stream: a node program that was not told the job's end counts the launcher as lost."""
        if self._child is not None:
            with contextlib.suppress(OSError):
                self.writer.write_eof()
            await self._child.await_end()
        self._end_stream()
        await self._serving
        if self._child is not None:
            await self._child.await_end()

    def _end_stream(self) -> None:
        """End the stream at once."""
        self.writer.transport.abort()
        if self._child is not None:
            self._child.kill()

    async def describe_end(self) -> str:
        """Describe why there is no node program."""
        if self.why_silent or self._child is None:
            return self.why_silent or "the connection ended"
        return await self._child.describe_end()

    async def _serve(self) -> None:
        """Process messages to the end of the stream, then tell all who wait that it has ended."""
        try:
            handlers: protocol.Handlers = {"process": self._change, "stop": self._stop}
            await self.serve(lambda call: in_thread(self.store, call), handlers, awaits_mark=True)
        except asyncio.TimeoutError:
            self.why_silent = f"no heartbeat for {self.heartbeat_timeout:g} s"
        except OSError:  # broken, or what arrives is no message
            pass
        self._end_stream()
        why = self.why_silent or ("its node program was killed" if self.is_here else "the connection ended")
        self.on_lost(why)
        for number in list(self._processes):
            await self._change(number, is_gone=True, error=why)

    async def _stop(self, number: int, is_second: bool) -> None:
        """The node program has received a stop signal; it ends at a second one."""
        if is_second:
            self.why_silent = f"stopped by a second signal, {signal.Signals(number).name}"
        self.on_stop(number)

    async def _change(self, process: int, **changes: Any) -> None:
        """Pass changes of a process on to who waits for them; it is gone once."""
        take = self._processes.pop if changes.get("is_gone") else self._processes.get
        if (changed := take(process, None)) is not None:
            await changed.events.put(changed, changes)


async def close_all(connections: Iterable[NodeConnection]) -> None:
    """Close connections in parallel."""
    await asyncio.gather(*(connection.close() for connection in connections))
