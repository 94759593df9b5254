"""DGL's server without its sleep: the order of things, with a stand-in for DGL's modules."""

from __future__ import annotations

import inspect
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

from dglkge.distributed import dgl_compat
from dglkge.distributed.dgl_compat import dgl


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


def test_other_machines_get_one_moment() -> None:
    log: list[Any] = []
    server = toy_server(log)
    with dgl_compat.without_sleep(server, log.append):
        for client in (0, 1):
            server.rpc.connect_receiver("192.0.2.1", "30050", client, 0)  # RFC 5737: nobody's
    connects = [("connect", "192.0.2.1", client, 0) for client in (0, 1)]
    assert log == [dgl_compat.REMOTE_PAUSE_SECONDS, *connects]


def test_short_sleeps_stay_and_all_is_put_back() -> None:
    log: list[Any] = []
    server = toy_server(log)
    connect = server.rpc.connect_receiver
    with dgl_compat.without_sleep(server, log.append):
        server.time.sleep(1)
    assert log == [1]
    assert server.time is time
    assert server.rpc.connect_receiver is connect


def test_dgl_still_sleeps_where_it_is_replaced() -> None:
    """A version of DGL that does otherwise needs another look."""
    rpc_server = dgl.distributed.rpc_server
    source = inspect.getsource(rpc_server)
    assert f"time.sleep({dgl_compat.DGL_SLEEP_SECONDS})" in source
    assert "rpc.connect_receiver(" in source
    assert {"sleep"} == {word.partition("(")[0] for word in source.split("time.")[1:]}
    assert rpc_server.rpc is dgl.distributed.rpc
