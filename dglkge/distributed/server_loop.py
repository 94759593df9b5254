"""DGL's server loop, without the three seconds that it sleeps at the start of every job.

Before DGL's server (``rpc_server.py`` of 1.1.3 and 2.1.0) calls its clients back it sleeps, so that their
sockets listen by then. Here it looks whether they do: for clients of its own machine in the kernel's table,
for others it gives them a moment. Were one later still, DGL's own connection would try again.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Callable
from unittest import mock

from dglkge.distributed.server_ports import wait_until_listening

DGL_SLEEP_SECONDS = 3
"""What DGL sleeps once; its shorter sleeps, between attempts to connect, stay as they are."""

REMOTE_PAUSE_SECONDS = 0.5
"""For clients on other machines: between their greeting and their listening lie milliseconds."""

LISTEN_LIMIT_SECONDS = 10.0


@contextlib.contextmanager
def without_sleep(rpc_server: Any, pause: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Run DGL's server inside this block.

    Parameters
    ----------
    rpc_server : module
        ``dgl.distributed.rpc_server``; its clock and its ``rpc.connect_receiver`` are replaced.
    pause : callable
        Waits some seconds; for tests.
    """
    connect = rpc_server.rpc.connect_receiver
    pause_once = functools.cache(pause)

    def connect_when_listening(address: str, port: str, *identity: int) -> Any:
        if is_own_address(address):
            wait_until_listening([int(port)], LISTEN_LIMIT_SECONDS)
        else:
            pause_once(REMOTE_PAUSE_SECONDS)
        return connect(address, port, *identity)

    def sleep(seconds: float) -> None:
        if seconds < DGL_SLEEP_SECONDS:
            pause(seconds)

    with contextlib.ExitStack() as replaced:
        replaced.enter_context(mock.patch.object(rpc_server, "time", SimpleNamespace(sleep=sleep)))
        replaced.enter_context(mock.patch.object(rpc_server.rpc, "connect_receiver", connect_when_listening))
        yield


def is_own_address(address: str) -> bool:
    """Tell whether an IPv4 address is one of this machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
