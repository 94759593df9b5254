"""The server's socket."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed")

from dglkge.serving.server import is_loopback, listening_socket, url_of


def test_small_answers_are_not_delayed():
    """asyncio sets TCP_NODELAY only on sockets that name their protocol; else answers wait 40 ms."""
    with listening_socket("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP
        assert is_loopback(bound) and url_of(bound, "127.0.0.1").startswith("http://127.0.0.1:")


def test_all_addresses_are_not_loopback():
    with listening_socket("0.0.0.0", 0) as bound:
        assert not is_loopback(bound)
        assert url_of(bound, "::1") == f"http://[::1]:{bound.getsockname()[1]}/"
