"""The graph that DGL gets: parallel edges, loops, padding, and METIS on all of them."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest

from dglkge.partition.build_graph import (
    LDG_PASSES,
    assign_nodes,
    build_graph,
    ldg_parts,
    metis_parts,
    symmetric_graph,
)
from dglkge.partition.run_build import GraphJob
from dglkge.typing import RELATION


def job(**changes) -> GraphJob:
    content = {
        "graph_name": "g",
        "num_parts": 2,
        "part_method": "random",
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


@pytest.mark.parametrize(
    "method, num_parts", [("metis", 2), ("metis", 3), ("ldg", 3), ("random", 3), ("random", 1)]
)
def test_every_partition_owns_a_node_of_every_type(method, num_parts):
    with contextlib.redirect_stdout(io.StringIO()):
        parts = assign_nodes(job(part_method=method, num_parts=num_parts), TRAIN)
    assert {ntype: len(found) for ntype, found in parts.items()} == {"a": 4, "b": 3, RELATION: 3}
    for found in parts.values():
        assert set(found.tolist()) == set(range(num_parts))


def parts_of(a: list[int], b: list[int]) -> dict[str, np.ndarray]:
    return {"a": np.array(a), "b": np.array(b), RELATION: np.array([0, 1, 0])}


def test_graph_has_one_edge_of_each_type_in_every_partition_and_a_loop_per_relation():
    parts = parts_of([1, 0, 1, 0], [1, 1, 0])
    graph = build_graph(job(), parts)
    assert {ntype: graph.num_nodes(ntype) for ntype in graph.ntypes} == {"a": 4, "b": 3, "relation": 3}
    assert [ends.tolist() for ends in graph.edges(etype="relation_relation")] == [[0, 1, 2]] * 2
    ends = {"a_a": [[1, 0], [1, 0]], "a_b": [[1, 0], [2, 0]]}
    assert {name: [one.tolist() for one in graph.edges(etype=name)] for name in ends} == ends


def greedy(order, heads, tails, num_parts, passes):
    """The rule of linear deterministic greedy, node by node with lists of Python."""
    num_nodes, parts = len(order), {}
    around = [[] for _ in range(num_nodes)]
    for head, tail in zip(heads, tails):
        around[head].append(tail)
        around[tail].append(head)
    in_degree = [tails.count(node) for node in range(num_nodes)]
    most_nodes, most_edges = (count * (1.05 / num_parts) for count in (num_nodes, len(heads)))
    for _ in range(passes):
        for node in order:
            parts.pop(node, None)
            found = []
            for part in range(num_parts):
                members = [one for one, of in parts.items() if of == part]
                load = max(
                    (len(members) + 1) / most_nodes,
                    (sum(in_degree[one] for one in members) + in_degree[node]) / most_edges,
                )
                near = sum(parts.get(one) == part for one in around[node] if one != node)
                found.append((-near * max(1 - load, 0), load, part))
            parts[node] = min(found)[2]
    return [parts[node] for node in range(num_nodes)]


@pytest.mark.parametrize("num_parts, dtype", [(2, np.int64), (3, np.int32)])
def test_ldg_is_the_greedy_rule(num_parts, dtype):
    rng = np.random.default_rng(3)
    heads, tails = rng.integers(0, 40, (2, 150))
    heads[:5] = tails[:5]
    in_degrees, rng = np.bincount(tails, minlength=40), np.random.default_rng(5)
    parts = ldg_parts(heads.astype(dtype), tails.astype(dtype), in_degrees, num_parts, rng)
    order = np.random.default_rng(5).permutation(40).tolist()
    assert parts.tolist() == greedy(order, heads.tolist(), tails.tolist(), num_parts, LDG_PASSES)


def test_ldg_cuts_less_than_random_and_balances():
    rng = np.random.default_rng(2)
    cluster = rng.integers(0, 20, 8000) * 50
    heads, tails = cluster + rng.integers(0, 50, 8000), cluster + rng.integers(0, 50, 8000)
    parts = ldg_parts(heads, tails, np.bincount(tails, minlength=1000), 4, np.random.default_rng(0))
    assert (parts[heads] != parts[tails]).mean() < 0.3  # at random 0.75
    assert np.bincount(parts).max() <= 1.06 * 250
    assert np.bincount(parts[tails]).max() <= 1.06 * 2000


def test_job_is_taken_once(tmp_path):
    job(seed=7).save(tmp_path)
    assert GraphJob.take(tmp_path) == job(seed=7)
    assert list((tmp_path / "partitions").iterdir()) == []
