"""The keyed order of the triples."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.sampling import triple_order
from dglkge.sampling.triple_order import EdgeSet, Pass, TripleOrder, plan_passes

SEED = 5


def test_one_set_is_the_order_of_all_triples():
    order = TripleOrder([EdgeSet("train", range(1000))], SEED)
    positions = np.arange(1000)
    for epoch in (0, 3):
        expected = triple_order.inverse_permute(positions, 1000, SEED, epoch)
        assert np.array_equal(order.triple_ids(positions, epoch), expected)
    assert len(order.held_out(0)) == 0


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2])
def test_sets_in_order_and_each_triple_once(share):
    scattered = np.array([3, 4, 9, 40, 41, 77], np.int64)
    sets = [EdgeSet("b", scattered), EdgeSet("a", range(100, 700)), EdgeSet("empty", range(0))]
    order = TripleOrder(sets, SEED, share)
    held = [set(order.held_out(number).tolist()) for number in range(3)]
    assert [len(part) for part in held] == [int(np.ceil(len(part.triple_ids) * share)) for part in sets]
    seen = []
    for epoch in range(3):
        ids = order.triple_ids(np.arange(order.num_positions), epoch)
        seen.append(ids)
        for number, edge_set in enumerate(sets):
            first, end = order.range_of(number)
            assert set(ids[first:end].tolist()) == set(edge_set.triple_ids) - held[number]
            assert end - first == len(edge_set.triple_ids) - len(held[number])
    assert not np.array_equal(seen[0], seen[1])
    # Any window is the same part of the order.
    assert np.array_equal(order.triple_ids(np.array([450, 3, 7]), 1), seen[1][[450, 3, 7]])


def test_the_same_triples_are_held_out_wherever_a_set_stands():
    a, b = EdgeSet("a", range(100)), EdgeSet("b", range(100, 200))
    first, second = TripleOrder([a, b], SEED, 0.1), TripleOrder([b, a], SEED, 0.1)
    assert set(first.held_out(0).tolist()) == set(second.held_out(1).tolist())
    other = TripleOrder([a, b], SEED + 1, 0.1)
    assert set(first.held_out(0).tolist()) != set(other.held_out(0).tolist())


def test_chunks_of_held_out_triples_make_all():
    order = TripleOrder([EdgeSet("a", range(101))], SEED, 0.3)
    chunks = [order.held_out(0, chunk, 4).tolist() for chunk in range(4)]
    assert sum(chunks, []) == order.held_out(0).tolist()
    assert {len(chunk) for chunk in chunks} <= {7, 8}


@pytest.mark.parametrize(("batch_size", "num_chunks"), [(1, 3), (7, 10), (64, 1), (64, 10), (1000, 3)])
def test_passes_tile_the_epoch(batch_size, num_chunks):
    ranges = [(0, 200), (200, 200), (200, 205)]
    passes = plan_passes(ranges, num_chunks, batch_size)
    assert [(part.edge_set, part.chunk) for part in passes] == [
        (s, c) for s in range(3) for c in range(num_chunks)
    ]
    bounds = [0, *(part.end_batch for part in passes)]
    assert [part.first_batch for part in passes] == bounds[:-1]
    assert bounds == sorted(bounds) and bounds[-1] == -(-205 // batch_size)
    # A pass ends with the batch that has its last triple.
    for part in passes:
        first, end = ranges[part.edge_set]
        position = first + (end - first) * (part.chunk + 1) // num_chunks
        assert (part.end_batch - 1) * batch_size < position <= part.end_batch * batch_size


def test_one_pass_by_default():
    assert plan_passes([(0, 101)], 1, 10) == [Pass(0, 0, 0, 11)]
