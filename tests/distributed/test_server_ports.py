"""Who listens, seen in the kernel's tables."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from dglkge.distributed.server_ports import listening_ports, wait_until_listening


def test_a_listening_port_is_seen_and_a_bound_or_closed_one_is_not() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert port not in listening_ports()
        server.listen()
        assert port in listening_ports()
        assert wait_until_listening([port], limit_seconds=0)
    assert port not in listening_ports()
    assert not wait_until_listening([port], limit_seconds=0.05)


def test_all_ports_are_waited_for() -> None:
    with socket.socket() as first, socket.socket() as second:
        for server in (first, second):
            server.bind(("127.0.0.1", 0))
        first.listen()
        ports = [first.getsockname()[1], second.getsockname()[1]]
        assert not wait_until_listening(ports, limit_seconds=0.05)
        later = threading.Timer(0.1, second.listen)
        later.start()
        assert wait_until_listening(ports, limit_seconds=30)
        later.join()


def test_without_the_kernels_tables_nobody_is_seen(tmp_path: Path) -> None:
    assert listening_ports([tmp_path / "tcp"]) == set()
