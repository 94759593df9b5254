"""Walks over pairs of ranges: every pair once, and loads as closed forms and brute force have them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dglkge.config.schema import BUCKET_ORDERS
from dglkge.data.range_walk import WALKS, Loads, count_loads, range_bounds, ranges_of, walk_pairs
from dglkge.errors import InputError

SIZES = (1, 2, 3, 5, 8, 13)


def brute_force_loads(steps, capacity: int) -> int:
    """Count by a list of ranges, the oldest first: what is missing is loaded, then the oldest go."""
    held: list = []
    loads = 0
    for needed in steps:
        for range_ in needed:
            loads += range_ not in held
        held = [range_ for range_ in held if range_ not in needed] + sorted(needed)
        held = held[max(0, len(held) - max(capacity, len(needed))) :]
    return loads


def loads_of(order: str, num_ranges: int, capacity: int, epoch: int = 0) -> int:
    """Return loads with memory for a number of ranges of one entity type."""
    steps = [{head, tail} for head, tail in walk_pairs(order, num_ranges, 5, epoch).tolist()]
    loads = count_loads(steps, dict.fromkeys(range(num_ranges), 10), 10 * capacity)
    assert loads == Loads(brute_force_loads(steps, capacity), 10 * loads.count)
    return loads.count


@pytest.mark.parametrize("order", BUCKET_ORDERS)
def test_every_pair_occurs_once_in_each_epoch(order: str) -> None:
    assert tuple(WALKS) == BUCKET_ORDERS
    for num_ranges in SIZES:
        everything = [(head, tail) for head in range(num_ranges) for tail in range(num_ranges)]
        walks = [walk_pairs(order, num_ranges, seed=3, epoch=epoch).tolist() for epoch in range(3)]
        assert [sorted(map(tuple, walk)) for walk in walks] == [everything] * 3
        assert walks[0] == walk_pairs(order, num_ranges, seed=3, epoch=0).tolist()
        assert num_ranges <= 3 or walks[0] != walks[1] != walks[2]


@pytest.mark.parametrize("order", BUCKET_ORDERS)
def test_loads_are_those_of_a_brute_force_simulation(order: str) -> None:
    for num_ranges in SIZES:
        for capacity in (1, 2, 3, 8):
            count = loads_of(order, num_ranges, capacity)
            assert num_ranges <= count <= loads_of(order, num_ranges, 1)
            assert capacity < num_ranges or count == num_ranges


def test_loads_of_each_order() -> None:
    """Two ranges in memory: the first pair costs two loads, and each load brings one new pair together."""
    for num_ranges in SIZES:
        fewest = 1 + num_ranges * (num_ranges - 1) // 2
        assert (
            loads_of("inside_out", num_ranges, 2) == loads_of("outside_in", num_ranges, 2, epoch=1) == fewest
        )
    counts = {order: loads_of(order, 16, 2) for order in BUCKET_ORDERS}
    assert counts["inside_out"] < counts["affinity"] < counts["hilbert"] < counts["random"]
    # The Hilbert curve passes from a cell to a neighbour on a power of two, under renamed ranges.
    walk = walk_pairs("hilbert", 8, 0, 0)
    assert ((walk[1:] != walk[:-1]).sum(axis=1) == 1).all()


def test_affinity_takes_what_is_in_memory_first() -> None:
    walk = [tuple(pair) for pair in walk_pairs("affinity", 7, 2, 1).tolist()]
    for place in range(1, len(walk)):
        last = set(walk[place - 1])
        shared = [2 if set(pair) <= last else bool(set(pair) & last) for pair in walk[place:]]
        assert shared[0] == max(shared), place


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4), num_ranges=st.integers(1, 7))
def test_ranges_are_contiguous_even_and_on_their_machine(lengths: list[int], num_ranges: int) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    bounds = range_bounds(starts, num_ranges)
    assert len(bounds) == len(lengths) * num_ranges + 1
    expected = []
    for length in lengths:
        ends = [length * turn // num_ranges for turn in range(num_ranges + 1)]
        sizes = np.diff(ends).tolist()
        assert max(sizes) - min(sizes) <= 1
        expected += [turn for turn, size in enumerate(sizes) for _ in range(size)]
    assert ranges_of(np.arange(starts[-1]), bounds, num_ranges).tolist() == expected


def test_an_unknown_walk_is_named() -> None:
    with pytest.raises(InputError, match="unknown sampling.bucket_order 'inside'; did you mean 'inside_out'"):
        walk_pairs("inside", 2, 0, 0)
