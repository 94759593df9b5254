"""The server's socket, and the benchmark of ``dglkge serve``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import urllib.request
from urllib.parse import urlsplit

import pytest

import serve_load

pytest.importorskip("uvicorn", reason="uvicorn is not installed")

from dglkge.serving import server as server_module
from dglkge.serving.server import listening_socket, url_of
from tests.serving.conftest import served


def test_small_answers_are_not_delayed():
    """asyncio sets TCP_NODELAY only on sockets that name their protocol; else answers wait 40 ms."""
    with listening_socket("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP
        assert url_of(bound, "::1") == f"http://[::1]:{bound.getsockname()[1]}/"


def connected(url):
    client = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=60)
    client.settimeout(60)
    return client


def received(client, last=None):
    """Return what the server sends: up to some last bytes, or until it has closed the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):  # closed before bytes of ours came
        while part := client.recv(65536):
            answer += part
            if last is not None and answer.endswith(last):
                break
    return answer


def half_sent_after_an_answer(url, half):
    """Return a connection that had an answer; a new one where this process was slower than the limit."""
    while True:
        client = connected(url)
        with contextlib.suppress(ConnectionError):
            client.sendall(half[:-2] + b"\r\n")
            if received(client, last=b"}").startswith(b"HTTP/1.1 200"):
                client.sendall(half)
                return client
        client.close()


def test_half_sent_headers_are_dropped(run_folder, monkeypatch):
    """Also on a connection that has had an answer: its keep-alive timeout ends with the first byte."""
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.5)
    half = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-"
    with served(run_folder) as url, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(url)) for _ in range(299)]
        for client in clients:
            with contextlib.suppress(ConnectionError):
                client.sendall(half)
        clients.append(stack.enter_context(half_sent_after_an_answer(url, half)))
        with urllib.request.urlopen(f"{url}health", timeout=60) as answer:
            assert json.load(answer)["status"] == "ok"
        assert {received(client) for client in clients} == {b""}


def test_the_benchmark_measures_every_route_and_ends_at_a_refusal(server):
    drawn = serve_load.draw_requests(server, 20)
    routes = {route.partition("?")[0].split()[0] for route in drawn}
    assert routes == {"/entities", "/similar", "/predict", "/triples"}
    for route, requests in drawn.items():
        figures = serve_load.measure(server, route, requests, 3)
        assert (figures.route, figures.connections, figures.requests) == (route, 3, len(requests))
        assert figures.requests_per_second > 0 and 0 < figures.p50_ms <= figures.p99_ms
    with pytest.raises(RuntimeError, match="/similar: .*entity: Field required"):
        asyncio.run(serve_load.load(server, [serve_load.Request("GET", "/similar")], 1))
