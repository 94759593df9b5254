"""All that differs between the supported versions of DGL, and the noise that it makes."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from dglkge.distributed.server_loop import without_sleep
from dglkge.distributed.server_ports import PortTakenError, hold_usable_address
from dglkge.distributed.world import choose_dgl_backend

choose_dgl_backend()

import dgl  # noqa: E402
import dgl.distributed  # noqa: E402

logger = logging.getLogger(__name__)


def serve(ip_config: str) -> None:
    """Be a server until all clients have left, then end the process.

    Parameters
    ----------
    ip_config : str
        Path of the file of addresses.

    Raises
    ------
    PortTakenError
        If another program listens on the server's port.
    """
    with without_sleep(dgl.distributed.rpc_server), _taken_ports_named():
        dgl.distributed.initialize(ip_config)
    sys.exit(0)


def connect(ip_config: str) -> None:
    """Be a client of the servers.

    Parameters
    ----------
    ip_config : str
        Path of the file of addresses; not read in the standalone mode.

    Raises
    ------
    PortTakenError
        If another program listens on the port that this client has chosen.
    """

    def choose_and_hold(remote: str) -> str:
        address, holder = hold_usable_address(remote)
        stack.enter_context(holder)
        return address

    with contextlib.ExitStack() as stack:
        rpc_client = dgl.distributed.rpc_client
        stack.enter_context(mock.patch.object(rpc_client, "get_local_usable_addr", choose_and_hold))
        # DGL 2.1 prints a line about GraphBolt, which says nothing to the user.
        stack.enter_context(contextlib.redirect_stdout(_LogWriter()))
        stack.enter_context(_taken_ports_named())
        dgl.distributed.initialize(ip_config)


def open_graph(graph_name: str, part_config: str) -> Any:
    """Return the ``DistGraph`` of the partitions that the servers hold.

    Parameters
    ----------
    graph_name : str
        Name under which the graph was partitioned.
    part_config : str
        Path of DGL's partition file; read in the standalone mode only.
    """
    with contextlib.redirect_stdout(_LogWriter()):
        return dgl.distributed.DistGraph(graph_name, part_config=part_config)


@contextlib.contextmanager
def _taken_ports_named() -> Iterator[None]:
    """Turn DGL's error for a port that is taken, known by its text alone, into one of ours."""
    try:
        yield
    except dgl.DGLError as error:
        found = re.search(r"Cannot bind to (\S+)", str(error))
        if found is None:
            raise
        raise PortTakenError(found.group(1)) from error


def disconnect() -> None:
    """Forget what DGL keeps in this process for the standalone mode, so that :func:`connect` starts anew.

    DGL's own ``exit_client`` is for clients of servers. Tensors and embeddings that are still referenced keep
    the store that they were made in; nobody else can reach it.
    """
    dgl.distributed.kvstore.close_kvstore()
    role = dgl.distributed.role
    role.PER_ROLE_RANK, role.GLOBAL_RANK, role.CUR_ROLE, role.IS_STANDALONE = {}, {}, None, False
    dgl.distributed.dist_tensor.DIST_TENSOR_ID = 0  # numbers the tensors without a name


class _LogWriter:
    """A stream that passes whole lines on to the log."""

    def write(self, text: str) -> int:
        if text.strip():
            logger.debug(text.rstrip())
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""
