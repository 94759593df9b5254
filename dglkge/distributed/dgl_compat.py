"""The only file that reaches into DGL's internals (2.1.0); the rest of the library uses its public interface.

It holds DGL's start and shutdown, the timeout of its requests, and functions of DGL that are replaced for a
while. Each work-around states what DGL does, and why the replacement is safe. Three files have reasons to
stay apart: :mod:`dglkge.optim` is usable alone and has a file like this one of its own, and ``dgl_import.py``
and ``dgl_memory.py`` prepare DGL in scripts that import nothing else of ours.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import dgl as dgl  # for those that import it from here
import dgl.distributed

from dglkge.distributed import addresses
from dglkge.distributed.dgl_import import name_segments

logger = logging.getLogger(__name__)

DGL_SLEEP_SECONDS = 3
"""The one sleep of DGL's server that is left out; its sleeps between attempts to connect are 1 s and stay."""

REMOTE_PAUSE_SECONDS = 0.5
"""Replaces that sleep for clients on other machines, which listen milliseconds after they registered."""

LISTEN_TIMEOUT_SECONDS = 10.0

STANDARD_ERROR = 2
# A list of one number: functions change it without a global statement.
_request_timeout_seconds = [600.0]


def serve(ip_config: str) -> None:
    """Run a server until all clients have left, then end the process.

    Raises PortTakenError if another program listens on the server's port.
    """
    name_segments()
    with without_sleep(dgl.distributed.rpc_server), _port_errors():
        dgl.distributed.initialize(ip_config)
    sys.exit(0)


def connect(ip_config: str) -> None:
    """Connect this process to the servers as a client; the file is not read in the standalone mode.

    Raises PortTakenError if another program listens on the port that this client has chosen.
    """

    def choose_and_hold(remote: str) -> str:
        address, holder = addresses.hold_usable_address(remote)
        stack.enter_context(holder)
        return address

    name_segments()
    with contextlib.ExitStack() as stack:
        # DGL's get_local_usable_addr (rpc_client.py) binds a free port, closes it and listens
        # there later; in between any connection of the machine may get that port. The replacement returns the
        # same kind of string and keeps the port bound until DGL listens on it.
        stack.enter_context(_replaced(dgl.distributed.rpc_client, get_local_usable_addr=choose_and_hold))
        # DGL prints a line about GraphBolt. It goes to the log.
        stack.enter_context(contextlib.redirect_stdout(_LogWriter()))
        stack.enter_context(_port_errors())
        dgl.distributed.initialize(ip_config)


def open_graph(graph_name: str, part_config: str) -> Any:
    """Return the ``DistGraph`` of the partitions that the servers hold.

    The partition file is read in the standalone mode only.
    """
    with contextlib.redirect_stdout(_LogWriter()):
        return dgl.distributed.DistGraph(graph_name, part_config=part_config)


def disconnect() -> None:
    """Reset DGL's global state of the standalone mode, so that :func:`connect` starts anew.

    DGL has no public function for this: its ``exit_client`` is for clients of servers. It keeps the
    store, the role and the counter of unnamed tensors in module variables, which are put back to their first
    values here. Tensors and embeddings that are still referenced keep the store that they were made in.
    """
    dgl.distributed.kvstore.close_kvstore()
    role = dgl.distributed.role
    role.PER_ROLE_RANK, role.GLOBAL_RANK, role.CUR_ROLE, role.IS_STANDALONE = {}, {}, None, False
    dgl.distributed.dist_tensor.DIST_TENSOR_ID = 0


@contextlib.contextmanager
def without_sleep(rpc_server: Any, pause: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Run DGL's server loop without its sleep of three seconds at the start of every job.

    ``rpc_server.start_server`` sleeps before it connects back to its clients, so that their
    sockets listen by then. Inside this block it checks instead whether they listen: clients of this machine
    in the kernel's table of sockets; clients of other machines get a short pause. This is safe because DGL
    tries again every second where the connection fails.
    """
    connect_receiver = rpc_server.rpc.connect_receiver
    # All clients have registered by then, so one pause covers them all.
    pause_once = functools.cache(pause)

    def connect_when_listening(address: str, port: str, *identity: int) -> Any:
        # A probing connection would not do: DGL counts every connection to a receiver as one of its senders.
        if addresses.is_own_address(address):
            addresses.wait_until_listening([int(port)], LISTEN_TIMEOUT_SECONDS)
        else:
            pause_once(REMOTE_PAUSE_SECONDS)
        return connect_receiver(address, port, *identity)

    def sleep(seconds: float) -> None:
        if seconds < DGL_SLEEP_SECONDS:
            pause(seconds)

    # The module's own name "time" is replaced, so other modules keep the real one.
    with _replaced(rpc_server, time=SimpleNamespace(sleep=sleep)):
        with _replaced(rpc_server.rpc, connect_receiver=connect_when_listening):
            yield


def set_request_timeout(seconds: float) -> None:
    """Set how long a request of this process to DGL's servers may take."""
    _request_timeout_seconds[0] = seconds


def request_timeout_seconds() -> float:
    """Return how long a request of this process to DGL's servers may take."""
    return _request_timeout_seconds[0]


@contextlib.contextmanager
def request_timeout() -> Iterator[None]:
    """End this process if the block, which sends requests to DGL's servers, takes longer than the timeout.

    DGL's ``recv_response`` waits without limit for a server that does not answer. It waits in
    C++ and holds Python's global lock, so no thread of Python could end it. The watchdog of ``faulthandler``
    is a thread of C: it prints where each thread waits and ends the process with status 1, and the launcher
    then ends the job. There is one such watchdog in a process, so blocks must not nest.
    """
    _start_watchdog()
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def limit_shutdown() -> None:
    """Apply the timeout to DGL's shutdown at exit too; call it after :func:`connect`.

    DGL registers ``exit_client`` with ``atexit``: a barrier of all clients without a limit. Exit handlers run
    in reverse order, so one that is registered later starts the watchdog before DGL's begins.
    """
    atexit.register(_start_watchdog)


def _start_watchdog() -> None:
    """Start the timer of the watchdog; a running one is replaced."""
    # Descriptor 2 and not sys.stderr, which may be replaced by an object without a descriptor.
    faulthandler.dump_traceback_later(request_timeout_seconds(), exit=True, file=STANDARD_ERROR)


@contextlib.contextmanager
def _port_errors() -> Iterator[None]:
    """Turn DGL's error for a port in use into :class:`PortTakenError`; DGL has no class or number for it."""
    try:
        yield
    except dgl.DGLError as error:
        match = re.search(r"Cannot bind to (\S+)", str(error))
        if match is None:
            raise
        raise addresses.PortTakenError(match.group(1)) from error


@contextlib.contextmanager
def _replaced(owner: Any, **members: Any) -> Iterator[None]:
    """Replace attributes of a module of DGL inside the block."""
    originals = {name: getattr(owner, name) for name in members}
    try:
        for name, value in members.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(owner, name, value)


class _LogWriter:
    """A text stream that writes whole lines to the log."""

    def write(self, text: str) -> int:
        """Log a line."""
        if text.strip():
            logger.debug(text.rstrip())
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""
