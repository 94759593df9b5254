"""The keyed order of the triples, and the hash that keys it."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.data.partition_layout import EdgeTable
from dglkge.kernels import hashing as keyed_hash
from dglkge.sampling import triple_order
from dglkge.sampling.edge_batches import EdgeBatches, EdgeOptions
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
    assert [len(one) for one in held] == [int(np.ceil(len(one.triple_ids) * share)) for one in sets]
    seen = []
    for epoch in range(3):
        ids = order.triple_ids(np.arange(order.num_positions), epoch)
        seen.append(ids)
        for number, one in enumerate(sets):
            first, end = order.range_of(number)
            assert set(ids[first:end].tolist()) == set(one.triple_ids) - held[number]
            assert end - first == len(one.triple_ids) - len(held[number])
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


@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
@pytest.mark.parametrize("num_chunks", [1, 3, 10])
def test_passes_tile_the_epoch(batch_size, num_chunks):
    ranges = [(0, 200), (200, 200), (200, 205)]
    passes = plan_passes(ranges, num_chunks, batch_size)
    assert [(one.edge_set, one.chunk) for one in passes] == [
        (s, c) for s in range(3) for c in range(num_chunks)
    ]
    bounds = [0, *(one.end_batch for one in passes)]
    assert [one.first_batch for one in passes] == bounds[:-1]
    assert bounds == sorted(bounds) and bounds[-1] == -(-205 // batch_size)
    # A pass ends with the batch that has its last triple.
    for one in passes:
        first, end = ranges[one.edge_set]
        position = first + (end - first) * (one.chunk + 1) // num_chunks
        assert (one.end_batch - 1) * batch_size < position <= one.end_batch * batch_size


def test_one_pass_by_default():
    assert plan_passes([(0, 101)], 1, 10) == [Pass(0, 0, 0, 11)]


def test_machines_share_the_batches_of_sets():
    rng = np.random.default_rng(0)
    edges = np.stack([np.arange(120), np.zeros(120, np.int64), np.arange(120)], axis=1)
    sets = [EdgeSet("b", range(80, 120)), EdgeSet("a", np.flatnonzero(np.arange(80) % 3).astype(np.int64))]
    order = TripleOrder(sets, SEED, 0.1)
    owner = rng.integers(0, 2, 120)
    trainers = []
    for part in range(2):
        ids = np.flatnonzero(owner == part)
        table = EdgeTable(ids, edges[ids], None)
        for local in range(2):
            options = EdgeOptions(np.zeros(1, np.int64), 120, 16, 8, local, 2, SEED, order=order)
            trainers.append(EdgeBatches(table, options))
    options = EdgeOptions(np.zeros(1, np.int64), 120, 16, 8, 0, 1, SEED, order=order)
    alone = EdgeBatches(EdgeTable(np.arange(120), edges, None), options)
    assert len(alone) == -(-order.num_positions // 16)
    for index in range(len(alone)):
        expected = alone.batch(2, index)
        found = [one.batch(2, index) for one in trainers]
        assert sorted(np.concatenate([one.triple_ids for one in found])) == sorted(expected.triple_ids)
        assert np.array_equal(expected.heads, expected.triple_ids)
        assert {one.global_size for one in found} == {expected.global_size}


MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """SplitMix64's finalizer, written with Python's own integers."""
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_words_equal_splitmix64_in_plain_integers() -> None:
    key = keyed_hash.combine(7, -3, 2**63)
    counters = np.array([0, 1, 2, 12345, 2**40])
    expected = [splitmix64((counter * 0x9E3779B97F4A7C15 + key) & MASK) for counter in counters.tolist()]
    assert keyed_hash.words(key, counters).tolist() == expected


def test_keys_depend_on_every_part_and_on_their_order() -> None:
    keys = {keyed_hash.combine(*parts) for parts in [(1, 2), (2, 1), (1, 2, 0), (1,), (0, 1, 2), (1, 3)]}
    assert len(keys) == 6


def test_below_is_uniform_and_in_range() -> None:
    for limit in (1, 3, 1000, 2**31, 2**40):
        drawn = keyed_hash.below(keyed_hash.combine(limit), 20_000, limit)
        assert drawn.min() >= 0 and drawn.max() < limit
    counts = np.bincount(keyed_hash.below(keyed_hash.combine(9), 100_000, 50), minlength=50)
    assert ((counts - 2000) ** 2 / 2000).sum() < 49 + 5 * np.sqrt(2 * 49)


LIMITS = [1, 3, 50, 1000, 10**9, 3 * 2**29, 2**31 + 1, 3 * 2**30, 2**32 - 1, 2**32, 7 * 2**33 + 5, 2**63]


@pytest.mark.parametrize("limit", LIMITS)
def test_below_is_the_upper_half_of_a_product(limit: int) -> None:
    """Against Python's own integers."""
    key = keyed_hash.combine(5, limit)
    drawn = keyed_hash.words(key, np.arange(2000)).tolist()
    assert keyed_hash.below(key, 2000, limit).tolist() == [word * limit >> 64 for word in drawn]


@pytest.mark.parametrize("limit", [10**9, 3 * 2**29, 2**31 - 1, 3 * 2**30])
def test_large_ranges_are_uniform(limit: int) -> None:
    """A method that spends 32 bits gives some numbers 5 of 2**32 words and others 4 at 10**9. Counted by this
    number of words, and by tenths of the range, the draws are as frequent as the numbers themselves."""
    num_draws = 400_000
    drawn = keyed_hash.below(keyed_hash.combine(11, limit), num_draws, limit)

    def num_words(values: np.ndarray) -> np.ndarray:
        """How many 32-bit words a number gets: the multiples of 1 / 2**32 in its share of [0, 1)."""
        exact = values.astype(object)
        return np.array([-((-(v + 1) << 32) // limit) + ((-v << 32) // limit) for v in exact], np.int64)

    least = 2**32 // limit
    expected_more = (2**32 - least * limit) / limit  # share of the numbers that get one word more
    share_more = (num_words(drawn) > least).mean()
    deviation = np.sqrt(expected_more * (1 - expected_more) / num_draws)
    assert abs(share_more - expected_more) < 5 * deviation
    counts = np.bincount(drawn * 10 // limit, minlength=10)
    assert ((counts - num_draws / 10) ** 2 / (num_draws / 10)).sum() < 9 + 5 * np.sqrt(2 * 9)
