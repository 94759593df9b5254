"""Which partition owns which node."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.partition.build_graph import fill_empty_parts, random_parts


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


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    num_parts=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_the_least_loaded_partition_takes_the_next_node(counts, num_parts, seed):
    type_of = np.repeat(np.arange(len(counts)), counts)
    in_degrees = np.random.default_rng(seed).integers(0, 9, len(type_of))
    found = random_parts(type_of, in_degrees, num_parts, np.random.default_rng(seed))
    assert found.tolist() == spread_slowly(type_of, in_degrees, num_parts, np.random.default_rng(seed))
    for type_, count in enumerate(counts):
        owned = np.bincount(found[type_of == type_], minlength=num_parts)
        assert owned.sum() == count and owned.max() - owned.min() <= 1


def test_partition_of_a_hub_gets_no_other_large_nodes():
    in_degrees = np.array([1000] + [10] * 50 + [0] * 51)
    parts = random_parts(np.zeros(102, dtype=np.int64), in_degrees, 2, np.random.default_rng(0))
    hub = parts[0]
    assert (in_degrees[parts == hub] > 0).sum() == 1 and (parts == hub).sum() == 51


def test_empty_parts_are_filled_with_the_least_loss():
    type_of = np.array([0, 0, 0, 0, 1, 1, 1])
    parts = np.array([0, 0, 0, 1, 1, 1, 1])
    in_degrees = np.array([5, 1, 9, 0, 3, 2, 4])
    filled = fill_empty_parts(parts, type_of, in_degrees, 2)
    assert filled.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert parts.tolist() == [0, 0, 0, 1, 1, 1, 1]


@settings(max_examples=60, deadline=None)
@given(num_parts=st.integers(1, 6), extra=st.integers(0, 5), seed=st.integers(0, 1000))
def test_no_part_stays_empty_and_as_few_nodes_move_as_can(num_parts, extra, seed):
    rng = np.random.default_rng(seed)
    type_of = np.repeat([0, 1], num_parts + extra)
    parts = rng.integers(0, num_parts, len(type_of))
    filled = fill_empty_parts(parts, type_of, rng.integers(0, 9, len(type_of)), num_parts)
    empty = 0
    for type_ in (0, 1):
        assert set(filled[type_of == type_]) == set(range(num_parts))
        empty += num_parts - len(set(parts[type_of == type_]))
    assert (filled != parts).sum() == empty
