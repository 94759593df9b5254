"""Node program: starts, watches, ends and cleans up the processes of a job on one machine.

The launcher has one on every machine, its own included, over a stream
(:mod:`dglkge.launch.remote.protocol`): the pipes of a child, of ssh, or a connection. When the stream ends,
or nothing arrives for HEARTBEAT_TIMEOUT_SECONDS where it may be lost without an end, the launcher counts as
lost: the program ends its processes (SIGTERM, GRACE_SECONDS later SIGKILL), removes their tables and shared
memory and exits. When the program itself is killed, the kernel ends its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from dglkge.distributed.jobs import JobEntry
from dglkge.distributed.lease import new_nonce
from dglkge.distributed.preemption import STOP_SIGNALS
from dglkge.distributed.world import OWN_DISKS_VARIABLE
from dglkge.launch.background import Report, in_thread, spawn
from dglkge.launch.fork_server import ForkServer
from dglkge.launch.machine import KILL_SECONDS, MachineJob, has_variable, node_tasks, wait_for_end
from dglkge.launch.remote import protocol
from dglkge.launch.stop_signals import status_of_stop

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
"""From SIGTERM to SIGKILL if the launcher is lost."""
LEFT_SECONDS = 15.0
"""Limit of the wait for processes of the attempt before."""

PROCESS_VARIABLE = "DGLKGE_PROCESS"
"""Tells to which process of the job an orphan belongs."""

_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


@dataclass(eq=False)
class _Process:
    """A process of the job: its number, pid, and whether it has ended, and with it all its descendants.

    Until it is started its pid is 0; `signal` is the last that was sent to it meanwhile.
    """

    number: int
    pid: int = 0
    signal: int = 0
    output: asyncio.Task[None] | None = None
    is_ended: bool = False
    gone: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


def _process_mark(number: int) -> str:
    """Return the value of PROCESS_VARIABLE of one process of this program."""
    return f"{os.getpid()}-{number}"


class NodeProgram:
    """Serves one launcher.

    `report` takes messages for the user of a node program that has connected by itself to `where`.
    """

    def __init__(
        self, peer: protocol.Peer, python: str, report: Report = lambda text: None, where: str = ""
    ) -> None:
        self._peer = peer
        self._report = report
        self._where = where
        self._end: tuple[int, str] | None = None
        self._processes: dict[int, _Process] = {}
        self._fork_server: ForkServer | None = None
        self._early: dict[int, int] = {}
        self._store_name = ""
        self._num_stops = 0
        self._job = MachineJob()
        self._tasks = {**node_tasks(self._job, python), "register": self._register}

    async def run(self, greeting: str = "") -> int:
        """Serve until the launcher has told the end of the job, or is lost; report why.

        `greeting` is reported once stop signals are handled. Returns the job's status, LOST_STATUS or that of
        a second stop signal.
        """
        loop = asyncio.get_running_loop()
        # Orphans of the job's processes become children of this program, so that it finds and ends them.
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        self._main = asyncio.current_task()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._take_stop_signal, number)
        self._report(greeting)
        self._peer.writer.write(protocol.MARK)
        handlers: protocol.Handlers = {"start": self._start, "signal": self._signal, "end": self._take_end}
        reason = "the connection ended"
        try:
            await self._peer.serve(lambda call: in_thread(protocol.answer, call, self._tasks), handlers)
        except asyncio.TimeoutError:
            reason = f"no heartbeat for {self._peer.heartbeat_timeout:g} s"
        # An end that overtakes what was sent is a reset; what has set the end cancels.
        except (ConnectionError, asyncio.CancelledError):
            pass
        except OSError as error:
            reason = error.strerror or str(error)
        finally:
            await self._end_processes()
            self._job.release()
        lost = f"the launcher at {self._where} is lost: {reason}; this node's part ends"
        status, words = self._end or (protocol.LOST_STATUS, lost)
        if words:
            self._report(words)
        return status

    async def _take_end(self, status: int, reason: str) -> None:
        """The launcher tells the end of the job."""
        self._leave(status, reason and f"the job has ended: {reason}")

    def _leave(self, status: int, words: str = "") -> None:
        """End :meth:`run`, with this result and last message."""
        self._end = status, words
        if self._main is not None:
            self._main.cancel()

    def _take_stop_signal(self, number: int) -> None:
        """Ask the launcher to stop the job; a second signal ends this program and its processes."""
        self._num_stops += 1
        self._peer.tell("stop", number=number, is_second=self._num_stops > 1)
        name = signal.Signals(number).name
        if self._num_stops == 1:
            self._report(f"received {name}: the launcher stops the job; a second signal ends this node")
        else:
            self._report(f"stopped by a second signal, {name}: this node's part ends")
            self._leave(status_of_stop(number))

    def _end_fork_server(self) -> None:
        """End the fork server: processes that it has not started yet will not be."""
        if self._fork_server is not None:
            self._fork_server.end()

    async def _start(self, processes: list[tuple[int, dict[str, str]]], **command: Any) -> None:
        """Start processes of one command, by whose numbers they are known from here on."""
        self._end_fork_server()  # of the attempt before
        self._early.clear()
        self._processes |= {number: _Process(number) for number, _ in processes}
        spawn(self._fork(processes, **command))

    async def _fork(self, processes: list[tuple[int, dict[str, str]]], **command: Any) -> None:
        """Start processes in sessions of their own; the kernel kills them if this program dies."""
        error, server = "the process that imports torch and DGL has ended", None
        try:
            for number, variables in processes:
                variables[PROCESS_VARIABLE] = _process_mark(number)
                # For the trainer that writes its machine's part of a checkpoint.
                if variables.get(OWN_DISKS_VARIABLE) and variables.get("LOCAL_RANK") == "0":
                    variables[protocol.STORE_VARIABLE] = await self._listen_for_requests()
                process, (reading, writing) = self._processes[number], os.pipe()
                process.output = asyncio.ensure_future(self._forward_output(process, reading))
                with open(writing, "wb", 0):
                    if server is None:
                        server = self._fork_server = ForkServer(output=writing, **command)
                    self._take_pid(process, *await server.fork(variables, writing))
        except ConnectionError:
            pass
        except (OSError, ValueError) as problem:  # no such program, or no folder
            error = str(problem)
        if server is not None:
            server.close()
        for number, _ in processes:
            self._take_pid(self._processes[number], 0, error)

    def _take_pid(self, process: _Process, pid: int, error: str) -> None:
        """Register a process that was started, or 0 and why it was not."""
        if process.pid or process.is_ended:
            return
        process.pid = pid
        if not pid:
            process.is_ended = True
            if process.signal:  # it counts as if it had been started before
                self._tell(process, status=-process.signal, ended_at=time.time())
            spawn(self._conclude(process, error))
            return
        self._tell(process, pid=pid)
        if pid in self._early:
            self._take_status(process, self._early[pid])
        elif process.signal:
            os.kill(pid, process.signal)

    def _take_status(self, process: _Process, status: int) -> None:
        """Report the status of a process that has ended, and end what it has left behind."""
        process.is_ended = True
        self._tell(process, status=os.waitstatus_to_exitcode(status), ended_at=time.time())
        spawn(self._conclude(process))

    def _tell(self, process: _Process, **changes: Any) -> None:
        """Tell the launcher changes of a process: its output, or fields of ``connection.RunningProcess``."""
        self._peer.tell("process", process=process.number, **changes)

    async def _listen_for_requests(self) -> str:
        """Listen for requests of trainers to the launcher's store; return the name of the socket."""
        if not self._store_name:
            # A name and no open descriptor, which a wrapper of the interpreter may close. An abstract one:
            # nothing is left of it, however this program ends.
            self._store_name = f"dglkge-store-{new_nonce()}"
            await asyncio.start_unix_server(self._relay, path=f"\0{self._store_name}")
        return self._store_name

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass a trainer's requests on to the launcher."""
        credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] == os.getuid():  # no process of another user
            with contextlib.suppress(OSError):  # the trainer has ended, or sends what is no message
                await protocol.Peer((reader, writer)).serve(self._pass_on, {})
        writer.close()

    async def _pass_on(self, call: protocol.Call) -> protocol.Reply:
        return await self._peer.request(call) or protocol.Reply(error="the launcher is lost")

    async def _forward_output(self, process: _Process, output: int) -> None:
        """Send the output of a process; reads on if the stream is lost, so that it is not blocked."""
        reader = await read_pipe(output)
        while data := await reader.read(protocol.BLOCK_BYTES):
            self._tell(process, data=data)
            await self._peer.drain()

    def _reap(self) -> None:
        """Wait for ended processes, orphans included; report the status of the job's own."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if self._fork_server is not None and self._fork_server.pid == pid:
                    self._fork_server.pid = 0
                running = [process for process in self._processes.values() if not process.is_ended]
                for process in running:
                    if process.pid == pid:
                        self._take_status(process, status)
                if not all(process.pid for process in running):
                    self._early[pid] = status  # maybe of one whose pid is not known yet

    async def _conclude(self, process: _Process, error: str | None = None) -> None:
        """End what a process has left behind, and report when all is gone, or why it was not started."""
        start, is_told = time.monotonic(), False
        while members := self._members(process):
            seconds = time.monotonic() - start
            if seconds > GRACE_SECONDS + KILL_SECONDS:
                break
            if seconds >= GRACE_SECONDS or not is_told:
                _send_signal(members, signal.SIGTERM if seconds < GRACE_SECONDS else signal.SIGKILL)
            is_told = True
            await asyncio.sleep(POLL_SECONDS)
        if process.output is not None:
            # One that is blocked in the kernel may hold the pipe.
            await asyncio.wait([process.output], timeout=None if not members else POLL_SECONDS)
        process.gone.set_result(None)
        self._tell(process, is_gone=True, error=error)

    def _members(self, process: _Process) -> list[psutil.Process]:
        """Return a process, if it has not ended, with all its descendants, orphans included."""
        pids = {other.pid for other in self._processes.values() if not other.is_ended}
        mark, members = _process_mark(process.number), []
        for child in psutil.Process().children():
            is_orphan = child.pid not in pids and has_variable(child, PROCESS_VARIABLE, mark)
            if is_orphan or child.pid == process.pid and not process.is_ended:
                members.append(child)
                with contextlib.suppress(psutil.Error):
                    members += child.children(recursive=True)
        return members

    async def _signal(self, process: int, number: int) -> None:
        """Send a signal to a process, and SIGKILL to all its descendants too."""
        running = self._processes[process]
        if not running.pid and not running.is_ended:
            running.signal = number
            self._end_fork_server()
        # SIGTERM and SIGINT go to the process alone, which decides what they mean to its children.
        elif number == signal.SIGKILL:
            _send_signal(self._members(running), number)
        elif not running.is_ended:
            os.kill(running.pid, number)

    async def _end_processes(self) -> None:
        """End all processes in place of the launcher."""
        self._end_fork_server()
        running = [process for process in self._processes.values() if not process.gone.done()]
        if not running:
            return
        self._job.update(is_ending=True)
        for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            for process in running:
                await self._signal(process.number, number)
            await asyncio.wait([process.gone for process in running], timeout=seconds)

    def _register(self, entry: Mapping[str, Any]) -> None:
        """Register the job, or prepare for its next attempt, once those of the one before are gone."""

        def running() -> list[int]:
            return [process.pid for process in self._processes.values() if not process.gone.done()]

        wait_for_end(running, LEFT_SECONDS, "the attempt before")
        self._job.register(JobEntry.from_dict(entry))


def _send_signal(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal; ignores processes that have ended."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


async def read_pipe(descriptor: int) -> asyncio.StreamReader:
    """Return a stream of what a pipe's descriptor delivers, which is closed at its end."""
    reader, pipe = asyncio.StreamReader(), os.fdopen(descriptor, "rb", 0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


async def open_streams(requests: int, replies: int) -> protocol.Streams:
    """Open the streams of two file descriptors, which may be of one socket."""
    loop = asyncio.get_running_loop()
    if stat.S_ISSOCK(os.fstat(requests).st_mode) and os.path.sameopenfile(requests, replies):
        return await asyncio.open_connection(sock=socket.socket(fileno=requests))
    reader = await read_pipe(requests)
    pipe = os.fdopen(replies, "wb", 0)
    transport, flow_control = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
    return reader, asyncio.StreamWriter(transport, flow_control, None, loop)


def main(heartbeat_timeout: float | None = protocol.HEARTBEAT_TIMEOUT_SECONDS) -> None:
    """Serve the launcher over stdin and stdout; prints of other code go to stderr."""
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    async def run() -> int:
        peer = protocol.Peer(await open_streams(requests, replies), heartbeat_timeout)
        return await NodeProgram(peer, sys.executable).run()

    status = asyncio.run(run())
    sys.stderr.flush()
    os._exit(0 if status == protocol.LOST_STATUS else status)  # a thread may be blocked by a disk


if __name__ == "__main__":
    main()
