"""Lines that are left out of the stream, and lines that never may be."""

from __future__ import annotations

import pytest

from dglkge.launch.console import is_noise


@pytest.mark.parametrize(
    "line",
    [
        "[00:11:44] /opt/dgl/src/rpc/rpc.cc:141: Sender with NetType~socket is created.",
        "[00:11:44] /opt/dgl/src/rpc/rpc.cc:161: Receiver with NetType~socket is created.",
        "[W1121 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
        "start graph service on server 0 for part 0",
        "Server is waiting for connections on [127.0.0.1:30050]...",
        "Server is waiting for connections non-blockingly on [127.0.0.1:30050]...",
        "Warning! Interface: ifb0 ",
        "IP address not available for interface.",
        "Client [7961] waits on 127.0.0.1:58971",
        "Machine (0) group (0) client (1) connect to server successfuly!",
        "Client[1] in group[0] is exiting...",
        "Server (0) shutdown.",
        "Initialize the distributed services with graphbolt: False",
    ],
)
def test_what_dgl_always_writes_is_noise(line: str) -> None:
    assert is_noise(line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Traceback (most recent call last):",
        "load my data from disk",
        "Server is on fire",
        "Warning! Interface: down and out",
        "[00:11:44] /opt/dgl/src/rpc/rpc.cc:390: cannot reach 10.0.0.1",
        "  Server (0) shutdown. Check failed",
        "[W1121 socket.cpp:207] [c10d] The client socket has timed out",
    ],
)
def test_everything_else_is_shown(line: str) -> None:
    assert not is_noise(line)
