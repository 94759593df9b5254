"""Processes of a node program, which are forked from the fork server of their command."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence

from dglkge.distributed.preemption import end_with_parent
from dglkge.launch.fork_server import MOST_BYTES, ROOM, VARIABLE


class ForkServer:
    """A process that imports what servers and trainers need, and from which they are forked, one by one.

    The kernel kills it if this process dies. Raises OSError or ValueError if it cannot be started.

    Parameters
    ----------
    command : list of str
        Of the processes: :mod:`dglkge.launch.script_runner` and its arguments.
    environment : mapping of str to str
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

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str, output: int
    ) -> None:
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with control:
            # A session of its own: signals of a terminal reach the launcher only.
            popen = subprocess.Popen(
                command,
                env={**os.environ, **environment, VARIABLE: ROOM},
                cwd=folder,
                stdin=control.fileno(),
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=functools.partial(end_with_parent, os.getpid()),
            )
        popen.returncode = 0  # the node program waits for it together with the orphans
        self.pid = popen.pid

    async def fork(self, variables: Mapping[str, str], output: int) -> tuple[int, str]:
        """Start a process with more variables and an output; return its pid, or 0 and an error.

        Raises ConnectionError if the server has ended.
        """
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
