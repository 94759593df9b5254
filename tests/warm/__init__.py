"""Python commands for tests that begin as copies of a process which has imported torch and DGL.

The imports take three CPU seconds in each process of a job, more than everything else that a small job does.
:func:`python` gives the words to put before a script, in place of ``python``. What runs is a copy (``fork``)
of a process of :mod:`tests.warm.server`; :mod:`tests.warm.client`, which the test sees, passes signals on and
ends with the same status. A launched job's servers and trainers are copies too.

:func:`runners` leaves launchers, agents, watchdogs and process numbers as they are: a server or trainer that
a watchdog has started becomes the client of a copy, which is on the same host of ``tests/cluster``.

Tests that look at processes (their numbers, children, command lines, environment), or that change what an
import sees, use plain ``python``. Servers and trainers that are copies are named after their role and number.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
VARIABLE = "DGLKGE_TEST_WARM_SOCKET"
START_SECONDS = 120
COPIED_BUILD = "DGLKGE_TEST_COPIED_BUILD"
"""Variable with which the child of partition.py is a copy too; it does not repeat METIS's partitions."""


def python() -> list[str]:
    """Return the first words of a command, in place of ``python``; starts the server at the first call."""
    _server()
    return [sys.executable, "-I", "-S", str(HERE / "client.py")]


SITE = """
import os, sys
with open("/proc/self/cmdline", "rb") as file:
    words = os.fsdecode(file.read()).split("\\0")[1:-1]
if words and os.path.basename(words[0]) == "script_runner.py":
    sys.argv = [{client!r}, *words]
    os.environ.setdefault({variable!r}, {socket!r})
    sys.path.insert(0, os.path.dirname({client!r}))
    import client
    os._exit(client.main())
"""
"""The module ``sitecustomize``, which Python imports at its start."""


def runners(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which servers and trainers of launched jobs are copies.

    Their launchers and watchdogs are ordinary processes. A process that a watchdog has started connects to
    the server as a client, which takes 20 ms instead of 3 s: it has the number, environment and command line
    that a test looks for, and what it stands for dies with it.
    """
    _server()
    socket = Path(os.environ[VARIABLE])
    folder = socket.with_name("site")
    if not folder.exists():
        folder.mkdir()
        text = SITE.format(client=str(HERE / "client.py"), variable=VARIABLE, socket=str(socket))
        (folder / "sitecustomize.py").write_text(text)
    path = os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**environment, "PYTHONPATH": path}


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    folder = tempfile.TemporaryDirectory(prefix="dglkge-warm-")
    path = os.path.join(folder.name, "socket")
    script = Path(folder.name, "python")
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {HERE / "client.py"} "$@"\n')
    script.chmod(0o755)
    # OpenMP reads its number of threads when it is loaded. The server ends with its standard input, so with
    # this process, however this ends.
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm.server", path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    line = server.stdout.readline()
    server.stdout.close()
    if line != b"ready\n":
        raise RuntimeError(f"the process that has imported everything said {line!r} (status {server.wait()})")
    os.environ[VARIABLE] = path
    atexit.register(folder.cleanup)
    return server


def processes(role: str) -> list[tuple[int, psutil.Process]]:
    """Return the living servers (``server``) or trainers (``client``) that are copies, and their numbers."""
    found = []
    for process in psutil.Process(_server().pid).children(recursive=True) if os.environ.get(VARIABLE) else ():
        with contextlib.suppress(psutil.Error):
            name, _, number = process.name().partition(" ")
            if name == role:
                found.append((int(number), process))
    return found


def stop() -> None:
    """End the server if it was started, and with it what it has started."""
    if _server.cache_info().currsize:
        server = _server()
        assert server.stdin is not None
        with contextlib.suppress(OSError):
            server.stdin.close()
        server.wait(START_SECONDS)
        del os.environ[VARIABLE]
        _server.cache_clear()
