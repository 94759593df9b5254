"""Which partition owns which node, the graph that DGL gets, and the verification of what is changed later."""

from __future__ import annotations

import contextlib
import io
import shutil

import dgl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.partition import build_graph as module
from dglkge.partition.build_graph import VerificationError, build_graph, ldg_parts
from dglkge.partition.run_build import GraphJob
from dglkge.typing import RELATION
from tests.toy_kg import toy_dataset


def quiet_metis_parts(*arguments) -> np.ndarray:
    with contextlib.redirect_stdout(io.StringIO()):
        return module.metis_parts(*arguments)


def spread_slowly(type_of: np.ndarray, in_degrees: np.ndarray, num_parts: int, rng: np.random.Generator):
    """The largest node first, each to the least loaded partition with room for its type; in plain Python."""
    order = rng.permutation(len(in_degrees))
    order = order[np.argsort(-in_degrees[order], kind="stable")]
    room = []
    for count in np.bincount(type_of).tolist():
        smallest, larger = divmod(count, num_parts)
        room.append([smallest + int(extra) for extra in rng.permutation(num_parts) < larger])
    load, parts = [0] * num_parts, [0] * len(in_degrees)
    for node in order.tolist():
        free = [part for part in range(num_parts) if room[type_of[node]][part]]
        parts[node] = min(free, key=load.__getitem__)
        load[parts[node]] += int(in_degrees[node])
        room[type_of[node]][parts[node]] -= 1
    return parts


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    num_parts=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_the_least_loaded_partition_takes_the_next_node(counts, num_parts, seed):
    type_of = np.repeat(np.arange(len(counts)), counts)
    in_degrees = np.random.default_rng(seed).integers(0, 9, len(type_of))
    parts = module.random_parts(type_of, in_degrees, num_parts, np.random.default_rng(seed))
    assert parts.tolist() == spread_slowly(type_of, in_degrees, num_parts, np.random.default_rng(seed))


def test_empty_parts_are_filled_with_the_least_loss():
    type_of = np.array([0, 0, 0, 0, 1, 1, 1])
    parts = np.array([0, 0, 0, 1, 1, 1, 1])
    in_degrees = np.array([5, 1, 9, 0, 3, 2, 4])
    filled = module.fill_empty_parts(parts, type_of, in_degrees, 2)
    assert filled.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert parts.tolist() == [0, 0, 0, 1, 1, 1, 1]


@settings(max_examples=60)
@given(num_parts=st.integers(1, 6), extra=st.integers(0, 5), seed=st.integers(0, 1000))
def test_no_part_stays_empty_and_as_few_nodes_move_as_can(num_parts, extra, seed):
    rng = np.random.default_rng(seed)
    type_of = np.repeat([0, 1], num_parts + extra)
    parts = rng.integers(0, num_parts, len(type_of))
    filled = module.fill_empty_parts(parts, type_of, rng.integers(0, 9, len(type_of)), num_parts)
    empty = 0
    for type_ in (0, 1):
        assert set(filled[type_of == type_]) == set(range(num_parts))
        empty += num_parts - len(set(parts[type_of == type_]))
    assert (filled != parts).sum() == empty


def test_symmetric_graph_is_that_of_a_dense_matrix():
    rng = np.random.default_rng(0)
    heads, tails = rng.integers(0, 12, (2, 70))
    dense = np.zeros((12, 12), dtype=bool)
    dense[heads, tails] = dense[tails, heads] = True
    np.fill_diagonal(dense, False)
    sources, targets = module.symmetric_graph(heads, tails, 12).edges()
    assert sorted(map(list, zip(sources.tolist(), targets.tolist()))) == np.argwhere(dense).tolist()


def test_metis_takes_parallel_edges_and_loops():
    """DGL's own way to make a graph symmetric corrupts the heap on some of these."""
    rng = np.random.default_rng(1)
    for num_parts in (2, 3, 4) * 10:
        num_nodes = int(rng.integers(5, 80))
        heads, tails = rng.integers(0, num_nodes, (2, int(rng.integers(1, 6 * num_nodes))))
        parts = quiet_metis_parts(heads, tails, num_nodes, num_parts)
        assert parts.shape == (num_nodes,) and 0 <= parts.min() <= parts.max() < num_parts


def test_graph_has_one_edge_of_each_type_in_every_partition_and_a_loop_per_relation():
    parts = {"a": np.array([1, 0, 1, 0]), "b": np.array([1, 1, 0]), RELATION: np.array([0, 1, 0])}
    edge_types = [["a", "a", 0, 4], ["a", "b", 4, 6]]
    graph = build_graph(GraphJob("g", 2, "random", 0, {"a": 4, "b": 3}, edge_types, 3, False), parts)
    assert {ntype: graph.num_nodes(ntype) for ntype in graph.ntypes} == {"a": 4, "b": 3, "relation": 3}
    assert [ends.tolist() for ends in graph.edges(etype="relation_relation")] == [[0, 1, 2]] * 2
    ends = {"a_a": [[1, 0], [1, 0]], "a_b": [[1, 0], [2, 0]]}
    assert {name: [ends_.tolist() for ends_ in graph.edges(etype=name)] for name in ends} == ends


def greedy(order, heads, tails, num_parts, passes):
    """The rule of linear deterministic greedy, node by node with a matrix of adjacency."""
    num_nodes = len(order)
    around = np.zeros((num_nodes, num_nodes))
    np.add.at(around, (heads, tails), 1)
    in_degrees = around.sum(0)
    around += around.T
    np.fill_diagonal(around, 0)
    parts = np.full(num_nodes, -1)
    most_nodes, most_edges = (count * (1.05 / num_parts) for count in (num_nodes, len(heads)))
    for node in [*order] * passes:
        parts[node] = -1
        members = parts == np.arange(num_parts)[:, None]
        num_edges = members @ in_degrees + in_degrees[node]
        loads = np.maximum((members.sum(1) + 1) / most_nodes, num_edges / most_edges)
        gains = members @ around[node] * np.maximum(1 - loads, 0)
        parts[node] = min(range(num_parts), key=lambda part: (-gains[part], loads[part], part))
    return parts.tolist()


@pytest.mark.parametrize("num_parts, dtype", [(2, np.int64), (3, np.int32)])
def test_ldg_is_the_greedy_rule(num_parts, dtype):
    rng = np.random.default_rng(3)
    heads, tails = rng.integers(0, 40, (2, 150))
    heads[:5] = tails[:5]
    in_degrees, rng = np.bincount(tails, minlength=40), np.random.default_rng(5)
    parts = ldg_parts(heads.astype(dtype), tails.astype(dtype), in_degrees, num_parts, rng)
    order = np.random.default_rng(5).permutation(40).tolist()
    assert parts.tolist() == greedy(order, heads, tails, num_parts, module.LDG_PASSES)


def test_clusters_stay_together_and_parts_are_balanced():
    rng = np.random.default_rng(2)
    cluster = rng.integers(0, 20, 8000) * 50
    heads, tails = cluster + rng.integers(0, 50, 8000), cluster + rng.integers(0, 50, 8000)
    ldg = ldg_parts(heads, tails, np.bincount(tails, minlength=1000), 4, np.random.default_rng(0))
    for parts, cut, slack in ((ldg, 0.3, 1.06), (quiet_metis_parts(heads, tails, 1000, 4), 0.05, 1.1)):
        assert (parts[heads] != parts[tails]).mean() < cut  # at random 0.75
        assert np.bincount(parts).max() <= slack * 250 and np.bincount(parts[tails]).max() <= slack * 2000


def verify(partitions) -> None:
    dataset = Dataset.open(partitions.parent)
    module.verify_partitions(partitions, GraphJob.of(dataset.description), dataset.split("train"))


def changed(function, *names: str):
    """Return a damage: arrays of a data set replaced by what a function makes of them."""

    def damage(partitions) -> None:
        for name in names:
            np.save(partitions / name, function(np.load(partitions / name)))

    return damage


def swapped(array: np.ndarray, place: int = 0) -> np.ndarray:
    array[[place, place + 1]] = array[[place + 1, place]]
    return array


def other_relation(edges: np.ndarray) -> np.ndarray:
    edges[0, 1] = (edges[0, 1] + 1) % edges[:, 1].max()
    return edges


TABLE_0, TABLE_1 = ([f"part{part}/{name}.npy" for name in ("triple_ids", "edges")] for part in (0, 1))


def take_of_the_other(partitions) -> None:
    """The last triple of partition 0 in partition 1, too."""
    for mine, other in zip(TABLE_1, TABLE_0):
        rows = [np.load(partitions / mine), np.load(partitions / other)[-1:]]
        np.save(partitions / mine, np.concatenate(rows))


def copy_of_the_other(partitions) -> None:
    for name in ("edge_feat.dgl", "graph.dgl", "node_feat.dgl"):
        shutil.copy(partitions / "part0" / name, partitions / "part1" / name)


def outer_node(partitions) -> None:
    path = str(partitions / "part0" / "graph.dgl")
    (graph,), _ = dgl.load_graphs(path)
    graph.ndata["inner_node"][0] = 0
    dgl.save_graphs(path, [graph])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed(swapped, "node_ids_person.npy"), "the id maps of person are not inverse"),
        (changed(lambda ids: ids + 1, "original_ids_town.npy"), "the id maps of town are not inverse"),
        (changed(lambda edges: edges[:, [2, 1, 0]], "part0/edges.npy"), "partition 0: "),
        (changed(other_relation, "part1/edges.npy"), "partition 1: edges .* are not those of the triples"),
        (changed(lambda ids: np.append(ids[:-1], 10**6), "part0/triple_ids.npy"), "1000000 is of no triple"),
        (changed(lambda array: array[1:], *TABLE_1), "partitions hold [0-9]+ of [0-9]+"),
        (changed(lambda array: swapped(array, 6), *TABLE_0), "partition 0: triple ids do not ascend"),
        (take_of_the_other, "partition 1: "),
        (copy_of_the_other, None),
        (outer_node, "partition 0: DGL's files hold nodes or edges of other"),
        (lambda partitions: (partitions / "part1" / "edges.npy").unlink(), "part1/edges.npy"),
    ],
)
def test_what_is_changed_is_noticed(tmp_path, damage, message, monkeypatch):
    partitions = shutil.copytree(toy_dataset(2, typed=True), tmp_path / "out") / "partitions"
    monkeypatch.setattr(module, "PIECE_ROWS", 7)
    verify(partitions)
    damage(partitions)
    with pytest.raises((VerificationError, AssertionError, InputError), match=message):
        verify(partitions)
