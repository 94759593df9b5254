"""Who listens, seen in the kernel's tables, and DGL's server without its sleep."""

from __future__ import annotations

import errno
import inspect
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dglkge.distributed import addresses, dgl_compat
from dglkge.distributed.addresses import (
    hold_usable_address,
    is_own_address,
    listening_ports,
    wait_until_listening,
)
from dglkge.distributed.dgl_compat import dgl


def test_all_ports_are_waited_for(tmp_path: Path) -> None:
    """A listening port is seen, and a bound or closed one is not; without the kernel's tables none is."""
    with socket.socket() as first, socket.socket() as second:
        for server in (first, second):
            server.bind(("127.0.0.1", 0))
        ports = [first.getsockname()[1], second.getsockname()[1]]
        assert not listening_ports() & set(ports)
        first.listen()
        assert listening_ports() & set(ports) == {ports[0]} and listening_ports([tmp_path / "tcp"]) == set()
        assert wait_until_listening(ports[:1], timeout_seconds=0)
        assert not wait_until_listening(ports, timeout_seconds=0.05)
        later = threading.Timer(0.1, second.listen)
        later.start()
        assert wait_until_listening(ports, timeout_seconds=30)
        later.join()
    assert not listening_ports() & set(ports)


def test_own_addresses() -> None:
    assert is_own_address("127.0.0.1")
    assert not is_own_address("192.0.2.1")


def test_a_port_that_is_held_goes_to_nobody_but_who_shares_it() -> None:
    """As DGL does: it sets SO_REUSEADDR. The kernel gives a held port to no connection."""
    address, holder = hold_usable_address("127.0.0.1")
    own, _, port = address.partition(":")
    assert own == "127.0.0.1"
    with holder, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((own, int(port)))
    address, holder = hold_usable_address("127.0.0.1")
    port = address.partition(":")[2]
    with holder, socket.socket() as dgl_socket:
        dgl_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        dgl_socket.bind(("127.0.0.1", int(port)))
        dgl_socket.listen()
        with socket.create_connection(("127.0.0.1", int(port))) as client:
            assert dgl_socket.accept()[1] == client.getsockname()


def test_where_no_way_leads_to_the_machine_loopback_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRoute(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(addresses.socket, "socket", NoRoute)
    address, holder = hold_usable_address("192.0.2.1")
    holder.close()
    assert address.startswith("127.0.0.1:")


def toy_server(log: list[Any]) -> SimpleNamespace:
    def connect_receiver(address: str, port: str, client: int, group: int) -> bool:
        log.append(("connect", address, client, group))
        return True

    return SimpleNamespace(time=time, rpc=SimpleNamespace(connect_receiver=connect_receiver))


def test_own_clients_are_called_once_they_listen() -> None:
    log: list[Any] = []
    server = toy_server(log)
    with socket.socket() as client:
        client.bind(("127.0.0.1", 0))

        def listen_late() -> None:
            log.append("listens")
            client.listen()

        later = threading.Timer(0.1, listen_late)
        with dgl_compat.without_sleep(server, log.append):
            server.time.sleep(3)
            later.start()
            assert server.rpc.connect_receiver("127.0.0.1", str(client.getsockname()[1]), 5, 0)
        later.join()
    assert log == ["listens", ("connect", "127.0.0.1", 5, 0)]  # and nothing slept


def test_other_machines_get_one_moment_and_all_is_put_back() -> None:
    """Short sleeps stay."""
    log: list[Any] = []
    server = toy_server(log)
    connect = server.rpc.connect_receiver
    with dgl_compat.without_sleep(server, log.append):
        server.time.sleep(1)
        for client in (0, 1):
            server.rpc.connect_receiver("192.0.2.1", "30050", client, 0)  # RFC 5737: nobody's
    connects = [("connect", "192.0.2.1", client, 0) for client in (0, 1)]
    assert log == [1, dgl_compat.REMOTE_PAUSE_SECONDS, *connects]
    assert server.time is time and server.rpc.connect_receiver is connect


def test_dgl_still_sleeps_where_it_is_replaced() -> None:
    rpc_server = dgl.distributed.rpc_server
    source = inspect.getsource(rpc_server)
    assert f"time.sleep({dgl_compat.DGL_SLEEP_SECONDS})" in source
    assert "rpc.connect_receiver(" in source
    assert {"sleep"} == {word.partition("(")[0] for word in source.split("time.")[1:]}
    assert rpc_server.rpc is dgl.distributed.rpc
