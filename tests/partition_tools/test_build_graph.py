"""The graph that DGL gets: parallel edges, loops, padding, and METIS on all of them."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest

from dglkge.partition.build_graph import PADDING, assign_nodes, build_graph, metis_parts, symmetric_graph
from dglkge.partition.run_build import GraphJob
from dglkge.typing import RELATION


def job(**changes) -> GraphJob:
    content = {
        "graph_name": "g",
        "num_parts": 2,
        "method": "random",
        "seed": 0,
        "entity_types": {"a": 4, "b": 3},
        "edge_types": [["a", "a", 0, 4], ["a", "b", 4, 6]],
        "num_relations": 3,
        "has_weights": False,
    }
    return GraphJob(**{**content, **changes})


TRAIN = np.array([[0, 0, 1], [1, 0, 2], [2, 1, 3], [3, 1, 0], [0, 2, 1], [1, 2, 1]])


def test_symmetric_graph_is_that_of_a_dense_matrix():
    rng = np.random.default_rng(0)
    heads, tails = rng.integers(0, 12, (2, 70))
    dense = np.zeros((12, 12), dtype=bool)
    dense[heads, tails] = dense[tails, heads] = True
    np.fill_diagonal(dense, False)
    sources, targets = symmetric_graph(heads, tails, 12).edges()
    assert sorted(zip(sources.tolist(), targets.tolist())) == list(
        zip(*(x.tolist() for x in np.nonzero(dense)))
    )


def test_metis_takes_parallel_edges_and_loops():
    """DGL's own way to make a graph symmetric corrupts the heap on some of these."""
    rng = np.random.default_rng(1)
    for num_parts in (2, 3, 4) * 10:
        num_nodes = int(rng.integers(5, 80))
        heads, tails = rng.integers(0, num_nodes, (2, int(rng.integers(1, 6 * num_nodes))))
        with contextlib.redirect_stdout(io.StringIO()):
            parts = metis_parts(heads, tails, num_nodes, num_parts)
        assert parts.shape == (num_nodes,) and 0 <= parts.min() <= parts.max() < num_parts


def test_metis_keeps_clusters_together():
    rng = np.random.default_rng(2)
    cluster = rng.integers(0, 2, 3000) * 100
    heads, tails = cluster + rng.integers(0, 100, 3000), cluster + rng.integers(0, 100, 3000)
    with contextlib.redirect_stdout(io.StringIO()):
        parts = metis_parts(heads, tails, 200, 2)
    assert (parts[heads] != parts[tails]).mean() < 0.05
    assert np.bincount(parts).min() > 80


@pytest.mark.parametrize("method", ["metis", "random"])
@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_every_partition_owns_a_node_of_every_type(method, num_parts):
    with contextlib.redirect_stdout(io.StringIO()):
        parts = assign_nodes(job(method=method, num_parts=num_parts), TRAIN)
    assert {ntype: len(found) for ntype, found in parts.items()} == {"a": 4, "b": 3, RELATION: 3}
    for found in parts.values():
        assert set(found.tolist()) == set(range(num_parts))


def parts_of(a: list[int], b: list[int]) -> dict[str, np.ndarray]:
    return {"a": np.array(a), "b": np.array(b), RELATION: np.array([0, 1, 0])}


def test_graph_has_edge_types_by_pair_and_a_loop_per_relation():
    graph = build_graph(job(), TRAIN, None, parts_of([0, 1, 0, 1], [0, 0, 1]))
    assert set(graph.canonical_etypes) == {
        ("a", "a_a", "a"),
        ("a", "a_b", "b"),
        ("relation", "relation_relation", "relation"),
    }
    heads, tails = graph.edges(etype=("a", "a_a", "a"))
    assert np.array_equal(np.stack([heads, tails], 1), TRAIN[:4, [0, 2]])
    data = graph.edges[("a", "a_a", "a")].data
    assert data["triple_id"].tolist() == [0, 1, 2, 3] and data["relation_id"].tolist() == [0, 0, 1, 1]
    assert [ends.tolist() for ends in graph.edges(etype="relation_relation")] == [[0, 1, 2]] * 2
    assert {ntype: graph.num_nodes(ntype) for ntype in graph.ntypes} == {"a": 4, "b": 3, "relation": 3}


def test_partition_without_an_edge_of_a_type_gets_a_padding_edge():
    parts = parts_of([0, 1, 0, 1], [1, 0, 1])  # both triples to b end in b1, which partition 0 owns
    weights = np.arange(6, dtype=np.float32)
    graph = build_graph(job(has_weights=True), TRAIN, weights, parts)
    data = graph.edges[("a", "a_b", "b")].data
    assert data["triple_id"].tolist() == [4, 5, PADDING] and data["relation_id"].tolist() == [2, 2, PADDING]
    assert data["weight"].tolist() == [4, 5, 0]
    padded_tail = graph.edges(etype=("a", "a_b", "b"))[1][2]
    assert parts["b"][padded_tail] == 1
    assert graph.num_edges(("a", "a_a", "a")) == 4


def test_job_is_taken_once(tmp_path):
    job(seed=7).save(tmp_path)
    assert GraphJob.take(tmp_path) == job(seed=7)
    assert list((tmp_path / "partitions").iterdir()) == []
