"""The benchmark of ``dglkge serve``: its client, its requests and its synthetic model."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import dglkge
import serve_load


def test_every_route_is_measured(server):
    drawn = serve_load.draw_requests(server, 20)
    assert {route.partition("?")[0].split()[0] for route in drawn} == {
        "/entities",
        "/similar",
        "/predict",
        "/triples",
    }
    for route, requests in drawn.items():
        figures = serve_load.measure(server, route, requests, 3)
        assert (figures.route, figures.connections, figures.requests) == (route, 3, len(requests))
        assert figures.requests_per_second > 0 and 0 < figures.p50_ms <= figures.p99_ms


def test_a_refused_request_ends_the_measurement(server):
    with pytest.raises(RuntimeError, match="/similar: .*entity: Field required"):
        asyncio.run(serve_load.load(server, [serve_load.Request("GET", "/similar")], 1))


def test_synthetic_rows_are_in_clusters(tmp_path):
    serve_load.write_synthetic(tmp_path, 5000, 8)
    run = dglkge.open_run(tmp_path)
    assert (run.tables.meta.score_function, len(run.tables.vocabulary("entity"))) == ("complex", 5000)
    rows = run.tables["entity"][:].numpy()
    nearest = run.similar("7", 3)["cosine"].to_numpy()
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert nearest.min() > 0.8 > abs(np.median(unit @ unit[7]))
