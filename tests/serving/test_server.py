"""Search for names, approximate similarity, the server's socket, and the benchmark of ``dglkge serve``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import urllib.request
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

import dglkge
import serve_load
from dglkge.serving.explorer import Explorer, NameIndex, Neighbours
from tests.checkpoint.toy_checkpoint import ToyTable, save_toy, toy_meta, toy_tables
from tests.serving.conftest import served

pytest.importorskip("uvicorn", reason="uvicorn is not installed")

from dglkge.serving import server as server_module
from dglkge.serving.server import listening_socket, url_of


def connected(url):
    return socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=60)


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


def test_small_answers_are_not_delayed_and_half_sent_headers_are_dropped(run_folder, monkeypatch):
    """Also on a connection that has had an answer: its keep-alive timeout ends with the first byte."""
    with listening_socket("127.0.0.1", 0) as bound:
        # asyncio sets TCP_NODELAY only on sockets that name their protocol; else answers wait 40 ms.
        assert bound.proto == socket.IPPROTO_TCP
        assert url_of(bound, "::1") == f"http://[::1]:{bound.getsockname()[1]}/"
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
    assert len(drawn) >= 4
    for route, requests in drawn.items():
        figures = serve_load.measure(server, route, requests, 3)
        assert figures.requests_per_second > 0 and 0 < figures.p50_ms <= figures.p99_ms
    with pytest.raises(RuntimeError, match="/similar: .*entity: Field required"):
        asyncio.run(serve_load.load(server, [serve_load.Request("GET", "/similar")], 1))


NAMES = "banana|Straße|strasse 2|Ada|adamant|ADA|a|ä|Madam|🦊 fox|x\ty|日本|本|".split("|")
TEXTS = "|an|a|A|ad|ss|ß|STRASSE|🦊|本|ab|b a|zzz|\n|a\nb|ä|\t".split("|")


def draw_names(count: int) -> list[str]:
    draw = random.Random(0)
    return list({"".join(draw.choices("aAbBß🦊 ", k=draw.randrange(1, 6))) for _ in range(count)})


@pytest.mark.parametrize("names", [NAMES, draw_names(300), []], ids=["chosen", "drawn", "none"])
def test_as_a_loop_over_all_names(names):
    index = NameIndex(names)
    for text in TEXTS:
        folded = text.casefold()
        starting = [id_ for id_, name in enumerate(names) if name.casefold().startswith(folded)]
        ids = list(index.starting(text))
        assert sorted(ids) == starting
        assert [names[id_].casefold() for id_ in ids] == sorted(names[id_].casefold() for id_ in starting)
        inside = [id_ for id_, name in enumerate(names) if folded in name.casefold() and id_ not in starting]
        assert list(index.containing(text)) == inside


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    meta = toy_meta(num_people=3000, dim=16, dataset_path="/nowhere")
    tables = toy_tables(meta)
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(60, 16, generator=generator)
    rows = centres[torch.arange(3000) % 60] + 0.4 * torch.randn(3000, 16, generator=generator)
    tables["person"] = ToyTable(rows, tables["person"].state)
    folder = tmp_path_factory.mktemp("clusters") / "run"
    save_toy(folder / "checkpoint", meta, tables, num_parts=2)
    return dglkge.open_run(folder)


def test_large_types_are_searched_approximately(clusters):
    pytest.importorskip("faiss", reason="faiss is not installed")
    index, hits = Neighbours(clusters.tables, "person"), 0
    assert index.recall >= 0.95 and 1 <= index.num_searched < index.num_lists
    for entity in range(0, 3000, 100):
        ids, cosines = zip(*index.search(entity, 10))
        names = [f"person-{id_}" for id_ in ids]
        exact = dict(clusters.nearest(f"person-{entity}", "person", 3000))
        assert len(ids) == 10 and entity not in ids and list(cosines) == sorted(cosines, reverse=True)
        np.testing.assert_allclose(cosines, [exact[name] for name in names], atol=1e-6)
        hits += len(set(names) & set(list(exact)[:10]))
    assert hits / 300 > 0.9
    assert Explorer(clusters, 3001).describe()["similarity"] == {"person": {"method": "exact"}}
    explorer = Explorer(clusters, 3000)
    neighbours = explorer.similar("person-7", None, 5)
    assert neighbours["method"] == "faiss" and len(neighbours["similar"]) == 5
    assert neighbours["similar"][0]["name"] == clusters.nearest("person-7", "person", 1)[0][0]
    described = explorer.describe()["similarity"]["person"]
    assert described["recall_at_10"] >= 0.95 and described["lists_searched"] < described["lists"]
