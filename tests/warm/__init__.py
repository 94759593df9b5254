"""Python commands for tests that begin as copies of a process which has imported torch and DGL.

The imports take three CPU seconds in each process of a job. :func:`python` gives the words to put in place of
``python``: what runs is a copy (``fork``) of :mod:`tests.warm.server`; :mod:`tests.warm.client`, which the
test sees, passes signals on and ends with the same status. So do servers and trainers of a launched job.

Tests that look at processes (their numbers, children, command lines, environment), or that change what an
import sees, use plain ``python``. Servers and trainers that are copies are named after their role and number.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE

import psutil

HERE = Path(__file__).resolve().parent
CLIENT = [sys.executable, "-I", "-S", str(HERE / "client.py")]
"""With Python itself, which ``sys.executable`` may not be later."""

VARIABLE = "DGLKGE_TEST_WARM_SOCKET"
TEMPLATE = "DGLKGE_TEST_WARM_TEMPLATE"
"""Variable with the socket of the server of which those of all workers are copies."""

START_SECONDS = 120
COPIED_BUILD = "DGLKGE_TEST_COPIED_BUILD"
"""Variable with which the child of partition.py is a copy too; it does not repeat METIS's partitions."""

PLAIN = "--plain"
"""Word before a command whose ``sys.executable`` is Python itself."""


def python() -> list[str]:
    """Return the first words of a command, in place of ``python``; starts the server at the first call."""
    _server()
    return [*CLIENT]


SITE = """
import os, sys
with open("/proc/self/cmdline", "rb") as file:
    words = os.fsdecode(file.read()).split("\\0")[1:-1]
script = os.path.basename(words[0]) if words else ""
if script == "script_runner.py" or script == "build_graph.py" and {build!r} in os.environ:
    sys.argv = [{client!r}, *words]
    os.environ.setdefault({variable!r}, {socket!r})
    sys.path.insert(0, os.path.dirname({client!r}))
    import client
    os._exit(client.main())
"""
"""The module ``sitecustomize``, which Python imports at its start."""


def runners(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which servers and trainers of launched jobs are clients of copies.

    Their launchers and node programs are ordinary processes. A client has the number, environment and command
    line that a test looks for, and its copy is on the same host of ``tests/cluster``.
    """
    folder = _server().socket.with_name("site")
    path = os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**environment, "PYTHONPATH": path}


class Server:
    """A process of :mod:`tests.warm.server`: its socket, its number, and the pipe with which it ends."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dglkge-warm-")
        self.socket = Path(self._folder.name, "socket")
        self.executable = Path(self._folder.name, "python")
        assignment = shlex.quote(f"{VARIABLE}={self.socket}")
        self.executable.write_text(f'#!/bin/sh\nexec env {assignment} {shlex.join(CLIENT)} "$@"\n')
        self.executable.chmod(0o755)
        site = self.socket.with_name("site")
        site.mkdir()
        text = SITE.format(client=CLIENT[-1], variable=VARIABLE, socket=str(self.socket), build=COPIED_BUILD)
        (site / "sitecustomize.py").write_text(text)
        template = environment.get(TEMPLATE)
        command = [*CLIENT, "--serve"] if template else [CLIENT[0], "-m", "tests.warm.server"]
        # OpenMP reads its number of threads when it is loaded. The server ends with its standard input, so
        # with this process, however this ends.
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1]), VARIABLE: template or ""}
        self._process = subprocess.Popen(
            [*command, str(self.socket)], env={**environment, **variables}, stdin=PIPE, stdout=PIPE
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._process.stdout.close()
        if not line.startswith(b"ready "):
            status = self._process.wait()
            raise RuntimeError(f"the process that imports everything said {line!r} (status {status})")
        self.pid = int(line.split()[1])
        atexit.register(self._folder.cleanup)

    def plain_python(self) -> list[str]:
        """Return the first words of a command that runs a copy which itself starts plain Python."""
        return [str(self.executable), PLAIN]

    def stop(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait(START_SECONDS)


@functools.cache
def _server() -> Server:
    server = Server(os.environ)
    os.environ[VARIABLE] = str(server.socket)
    return server


def start_template(mark: Mapping[str, str]) -> Server:
    server = Server({**os.environ, **mark})
    os.environ[TEMPLATE] = str(server.socket)
    return server


def executable() -> str:
    return str(_server().executable)


def processes(role: str) -> list[tuple[int, psutil.Process]]:
    numbered = []
    for process in psutil.Process(_server().pid).children(recursive=True) if os.environ.get(VARIABLE) else ():
        with contextlib.suppress(psutil.Error):
            name, _, number = process.name().partition(" ")
            if name == role:
                numbered.append((int(number), process))
    return numbered


def stop() -> None:
    if _server.cache_info().currsize:
        _server().stop()
        del os.environ[VARIABLE]
        _server.cache_clear()
