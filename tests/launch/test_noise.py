"""Lines that are left out of the stream, and lines that never may be."""

from __future__ import annotations

import pytest

from dglkge.launch.console import is_noise, without_noise


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
        "Start to load partition from /d/graph.dgl which is 11744 bytes. It may take non-trivial time for "
        "large partition.",
        "Finished loading node data.",
        "[03:22:42] /opt/dgl/src/rpc/rpc.cc:390: ",
        "User pressed Ctrl+C, Exiting",
        "LIBXSMM_VERSION: main-1.17-3659 (25693771)",
        "LIBXSMM_TARGET: spr [Intel(R) Xeon(R) Processor]",
        "Registry and code: 13 MB",
        "Command: /venv/bin/python /venv/lib/dglkge/launch/script_runner.py train.py --set output=run ",
        "Uptime: 3.867570 s",
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
        "terminate called without an active exception",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "Command: make train",
        "Uptime: 3 s",
        "Finished loading my data.",
        "[W1121 socket.cpp:207] [c10d] The client socket has timed out",
    ],
)
def test_everything_else_is_shown(line: str) -> None:
    assert not is_noise(line)


STOPPED_SERVER = """[03:22:42] /opt/dgl/src/rpc/rpc.cc:390:\x20
User pressed Ctrl+C, Exiting
terminate called without an active exception

LIBXSMM_VERSION: main-1.17-3659 (25693771)
LIBXSMM_TARGET: spr [Intel(R) Xeon(R) Processor]
Registry and code: 13 MB
Command: /venv/bin/python /venv/lib/dglkge/launch/script_runner.py train.py --set output=run\x20
Uptime: 3.867570 s""".split("\n")


def test_nothing_is_shown_of_a_server_that_the_launcher_stops() -> None:
    assert without_noise(STOPPED_SERVER) == []
    assert without_noise(["last words", *STOPPED_SERVER]) == ["last words"]
    # Whatever the pipe has cut it into.
    for cut in range(len(STOPPED_SERVER)):
        first, second = STOPPED_SERVER[:cut], STOPPED_SERVER[cut:]
        shown = without_noise(first) + without_noise(second, first[-1] if first else "")
        assert [line for line in shown if line] == []


def test_an_abort_by_itself_is_shown_and_libxsmm_does_not_bury_it() -> None:
    lines = ["ValueError: too small", "", "terminate called without an active exception", *STOPPED_SERVER[3:]]
    assert without_noise(lines) == lines[:3]
