"""Processes of a node program, which are forked from the fork server of their command."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence

from dglkge.distributed.preemption import end_with_parent
from dglkge.launch.fork_server import ROOM, VARIABLE


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
    requests : sequence of tuple
        Of each process: its number, its variables, and the descriptor of its output, which is closed here.

    Attributes
    ----------
    pid : int
        0 once it has ended, which the node program finds.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
        requests: Sequence[tuple[int, Mapping[str, str], int]],
    ) -> None:
        self._requests = requests
        self._control, control = socket.socketpair()
        outputs = [output for _, _, output in requests]
        with contextlib.ExitStack() as opened:
            for output in outputs:
                opened.callback(os.close, output)
            opened.enter_context(control)
            # A session of its own: signals of a terminal reach the launcher only.
            popen = subprocess.Popen(
                command,
                env={**os.environ, **environment, VARIABLE: ROOM},
                cwd=folder,
                stdin=control.fileno(),
                stdout=outputs[0],
                stderr=outputs[0],
                pass_fds=outputs,
                start_new_session=True,
                preexec_fn=functools.partial(end_with_parent, os.getpid()),
            )
        popen.returncode = 0  # the node program waits for it together with the orphans
        self.pid = popen.pid

    async def fork(self) -> AsyncIterator[tuple[int, int, str]]:
        """Yield the number and pid of each process that has been forked, or its number, 0 and an error.

        Those that are left when the server ends are not forked. ConnectionError if it was killed.
        """
        reader, writer = await asyncio.open_connection(sock=self._control)
        writer.write(json.dumps(self._requests).encode())
        writer.write_eof()
        async for line in reader:
            number, pid, error = line.decode().strip("\n").split(" ", 2)
            yield int(number), int(pid), error
        writer.close()

    def end(self) -> None:
        """Kill it: what it has not forked yet is not started."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
