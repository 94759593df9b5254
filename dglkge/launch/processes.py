"""Processes of a node program: executed, or forked from the fork server of their command."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from dglkge.distributed.preemption import end_with_parent
from dglkge.launch.background import in_thread
from dglkge.launch.fork_server import ROOM, VARIABLE

MOST_OUTPUT_BYTES = 1 << 15
"""Less than a pipe holds that nobody reads yet."""


def execute(
    command: Sequence[str], variables: Mapping[str, str], folder: str, output: int, control: int | None = None
) -> int:
    """Start a program in a session of its own, and return its pid; the kernel kills it if this process dies.

    `output` is the descriptor of its output, errors included, `control` that of its input, if it has any; the
    variables are added to this process's. Raises OSError or ValueError if it cannot be started.
    """
    # A session of its own: signals of a terminal reach the launcher only.
    popen = subprocess.Popen(
        command,
        env={**os.environ, **variables},
        cwd=folder,
        stdin=subprocess.DEVNULL if control is None else control,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=functools.partial(end_with_parent, os.getpid()),
    )
    popen.returncode = 0  # the node program waits for it together with the orphans
    return popen.pid


class ForkServer:
    """A process that imports what servers and trainers need, and from which they are forked.

    Parameters
    ----------
    command : list of str
        Of the processes: :mod:`dglkge.launch.script_runner` and its arguments.
    environment : mapping of str to str
        The variables that the processes share, and those that libraries read when they are loaded.
    folder : str
        Working folder.
    num_processes : int
        It ends when so many have been forked.

    Attributes
    ----------
    pid : int
        0 once it has ended, which the node program finds.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], folder: str, num_processes: int
    ) -> None:
        self.command = command
        self._num_processes = num_processes
        self._output = tempfile.TemporaryFile("a+b")
        self._num_shown = 0
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = asyncio.Lock()
        with control:
            variables = {**environment, VARIABLE: ROOM}
            self.pid = execute(command, variables, folder, self._output.fileno(), control.fileno())

    async def fork(self, variables: Mapping[str, str], output: int) -> tuple[int, IO[bytes]]:
        """Start a process with more variables; return its pid, and a gate: it waits until this is closed.

        What the imports have printed is written to `output`, its descriptor, first. Raises OSError if the
        server has ended, or no process can be started.
        """
        request = json.dumps(dict(variables)).encode()
        async with self._lock:
            reading, writing = os.pipe()
            gate = open(writing, "wb")
            try:
                answer = await in_thread(self._exchange, request, [output, reading])
            finally:
                os.close(reading)
            text = os.pread(self._output.fileno(), MOST_OUTPUT_BYTES, self._num_shown)
            self._num_shown += len(text)
            pid, _, error = answer.partition(b" ")
            if int(pid or 0):
                os.write(output, text)
                self._num_processes -= 1
                if not self._num_processes:
                    self._control.close()
                return int(pid), gate
            gate.close()
        lines = text.decode(errors="replace").strip().splitlines()
        words = ["the process that imports torch and DGL has ended", *lines[-1:]]
        raise OSError(error.decode() or ": ".join(words))

    def _exchange(self, request: bytes, descriptors: list[int]) -> bytes:
        """Send a request, and return the answer; empty if the server has ended."""
        try:
            socket.send_fds(self._control, [request], descriptors)
            return self._control.recv(1 << 16)
        except OSError:
            return b""

    def end(self) -> None:
        """Kill it: what it has not forked yet is not started."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
