"""Fork server: imports torch, DGL and dglkge once; the servers and trainers of a machine are forked from it.

The node program starts it with the command of the job (:class:`ForkServer`), and sends it one datagram for
each process: its variables in JSON, with the descriptor of its output. The answer is its pid. A forked
process is made a child of the node program, as one that was started by it is. What imports print goes to the
output of the process that they are for. The program of the fork server itself is :func:`serve`, called by
``script_runner.py``: the standard library only, as there.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from dglkge.distributed.preemption import end_with_parent

VARIABLE = "DGLKGE_FORK_SERVER"
"""Set in the fork server; its value, spaces, is the room for the variables of a forked process.

``/proc/PID/environ`` shows the memory in which a program found its variables at its start. What finds the
processes of a job by their variables reads it, and so does ``ps``.
"""
ROOM = " " * 4096

MOST_BYTES = 1 << 20
"""Largest request."""


class ForkServer:
    """A process that imports what servers and trainers need, and from which they are forked, one by one.

    The kernel kills it if this process dies. Raises OSError or ValueError if it cannot be started.

    Parameters
    ----------
    command : list of str
        Of the processes: :mod:`dglkge.launch.script_runner` and its arguments.
    environment : dict
        The variables that the processes share, and those that libraries read when they are loaded.
    folder : str
        Working folder.
    output : int
        Descriptor of the first process's output.

    Attributes
    ----------
    pid : int
        0 once it has ended, which the node program finds.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: str, output: int) -> None:
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with control:
            # A session of its own: signals of a terminal reach the launcher only.
            popen = subprocess.Popen(
                command, env={**os.environ, **environment, VARIABLE: ROOM}, cwd=folder,
                stdin=control.fileno(), stdout=output, stderr=output, start_new_session=True,
                preexec_fn=functools.partial(end_with_parent, os.getpid()),
            )  # fmt: skip
        popen.returncode = 0  # the node program waits for it together with the orphans
        self.pid = popen.pid

    async def fork(self, variables: Mapping[str, str], output: int) -> tuple[int, str]:
        """Start a process with more variables and an output; return its pid, or 0 and an error.

        Raises ConnectionError if the server has ended.
        """
        import asyncio  # here: the fork server itself needs none of it

        socket.send_fds(self._control, [json.dumps(variables).encode()], [output])
        answer = await asyncio.get_running_loop().sock_recv(self._control, MOST_BYTES)
        if not answer:
            raise ConnectionError
        pid, _, error = answer.decode().partition(" ")
        return int(pid), error

    def close(self) -> None:
        """Let it end: there are no more processes to start."""
        self._control.close()

    def end(self) -> None:
        """Kill it: what it has not forked yet is not started."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)


def serve(prepare: Callable[[Mapping[str, str]], None]) -> None:
    """Fork a process for each request on standard input, and return in each of them; then the server exits.

    `prepare` is called with the variables of a process before it is forked, and imports what it needs.
    """
    node, control = os.getppid(), socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    gc.disable()  # what is imported stays: looking for garbage in it takes a tenth of the time
    while True:
        request, outputs, _, _ = socket.recv_fds(control, MOST_BYTES, 1)
        if not request:
            os._exit(0)
        for stream in (1, 2):
            os.dup2(outputs[0], stream)
        os.close(outputs[0])
        environment: dict[str, str] = json.loads(request)
        prepare(environment)
        gc.freeze()  # keeps the pages shared that hold the imported objects
        if _fork(node, control):
            control.close()
            _become(environment)
            return


def _fork(node: int, control: socket.socket) -> bool:
    """Fork a child that is the node program's, and tell its pid; return True in it, False here."""
    try:
        between = os.fork()
    except OSError as error:
        control.send(f"0 {error.strerror}".encode())
        return False
    if between:
        if os.waitpid(between, 0)[1]:
            control.send(b"0 it was killed at its start")
        return False
    between, child = os.getpid(), None
    try:
        child = os.fork()
        if child:
            control.send(b"%d" % child)
    finally:
        if child != 0:
            os._exit(0 if child else 1)
    # Its parent ends at once. The nearest ancestor that takes over orphans is the node program.
    while os.getppid() == between:
        time.sleep(0.0005)
    end_with_parent(node)
    return True


def _become(environment: Mapping[str, str]) -> None:
    """Take over what a new program starts with: session, variables, random numbers."""
    os.setsid()
    os.environ.pop(VARIABLE, None)
    threads = os.environ.get("OMP_NUM_THREADS")
    show({name: value for name, value in environment.items() if os.environ.get(name) != value})
    os.environ.update(environment)
    # OpenMP has read it when it was loaded.
    if os.environ.get("OMP_NUM_THREADS") != threads and "torch" in sys.modules:
        digits = re.match(r"\s*(\d+)", os.environ.get("OMP_NUM_THREADS", ""))
        sys.modules["torch"].set_num_threads(max(1, int(digits[1]) if digits else 1))
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else all processes draw the same numbers
    gc.enable()


def show(environment: Mapping[str, str]) -> None:
    """Write variables into the room for them in ``/proc/self/environ``; not if it is too small."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    name, room = f"{VARIABLE}=".encode(), ROOM.encode()
    at = ctypes.string_at(start, end - start).find(name + room) if start else -1
    text = b"".join(os.fsencode(f"{key}={value}") + b"\0" for key, value in environment.items()) + name
    if at >= 0 and len(text) <= len(name + room):
        ctypes.memmove(start + at, text.ljust(len(name + room)), len(name + room))
