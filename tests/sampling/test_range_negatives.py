"""Negatives of buckets: from the range of their side, the same on a machine, in the right proportions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

from dglkge.data.range_walk import range_bounds
from dglkge.sampling.edge_batches import EdgeBatch, EdgeGroup
from dglkge.sampling.range_negatives import NodeRanges, RangeNegatives
from dglkge.typing import Side

STARTS = {"person": np.array([0, 60, 100]), "place": np.array([0, 3, 8])}
PAIRS = [("person", "person"), ("person", "place")]
NUM_RANGES = 4
BOUNDS = {name: range_bounds(starts, NUM_RANGES) for name, starts in STARTS.items()}


def a_batch(ranges: tuple[tuple[int, int], ...] = ((1, 3), (2, 0)), index: int = 0) -> EdgeBatch:
    """Return two chunks with one edge type each."""
    groups = (EdgeGroup(0, 0, 0, 3), EdgeGroup(1, 1, 3, 5))
    heads, tails, nothing = np.array([1, 2, 3, 4, 5]), np.array([6, 7, 8, 0, 1]), np.zeros(5, np.int64)
    return EdgeBatch(0, index, 10, nothing, heads, nothing, tails, None, groups, None, ranges)


def sampler(
    side: Side, shares=(1.0, 0.0, 0.0), part: int = 0, number: int = 1000, weights=None, is_mixed=False
) -> RangeNegatives:
    ranges = NodeRanges(BOUNDS, NUM_RANGES, is_mixed)
    return RangeNegatives(side, number, shares, ranges, part, PAIRS, 3, weights)


def nodes_of(name: str, number: int, parts=(0, 1)) -> list[int]:
    """Return the nodes of a range, by hand."""
    nodes = []
    for part in parts:
        first, end = STARTS[name][part : part + 2].tolist()
        bounds = [first + (end - first) * turn // NUM_RANGES for turn in (number, number + 1)]
        nodes += range(*bounds)
    return nodes


@pytest.mark.parametrize(("side", "ranges"), [(Side.HEAD, (1, 2)), (Side.TAIL, (3, 0))])
def test_each_side_has_its_range_on_all_machines_uniformly(side: Side, ranges: tuple[int, int]) -> None:
    for chunk, number in enumerate(ranges):
        drawn = sampler(side, number=20_000).sample("person", a_batch(), chunk)
        nodes = nodes_of("person", number)
        counts = np.bincount(drawn, minlength=100)
        assert counts.sum() == counts[nodes].sum() == 20_000
        assert chisquare(counts[nodes]).pvalue > 1e-4


@pytest.mark.parametrize("part", [0, 1])
def test_a_mixed_bucket_has_negatives_of_both_ranges_on_both_sides(part: int) -> None:
    shares, weights = (0.5, 0.5, 0.0), {"person": np.arange(100) % 5 + 1, "place": np.zeros(8, np.int64)}
    for chunk, ranges in enumerate(((1, 3), (2, 0))):
        for scale in (None, weights):
            heads, tails = (
                sampler(side, shares, part, 40_000, scale, is_mixed=True).sample("person", a_batch(), chunk)
                for side in Side
            )
            assert (heads == tails).all()
            for drawn, parts in ((heads[:20_000], (0, 1)), (heads[20_000:], (part,))):
                nodes = [node for number in ranges for node in nodes_of("person", number, parts)]
                counts = np.bincount(drawn, minlength=100)
                assert counts.sum() == counts[nodes].sum() == 20_000
                share = np.ones(100) if scale is None else weights["person"]
                expected = 20_000 * share[nodes] / share[nodes].sum()
                assert chisquare(counts[nodes], expected).pvalue > 1e-4


def test_trainers_of_a_machine_agree_and_machines_and_batches_do_not() -> None:
    drawn = sampler(Side.HEAD).sample("person", a_batch(), 0)
    assert (drawn == sampler(Side.HEAD).sample("person", a_batch(), 0)).all()
    assert (drawn != sampler(Side.HEAD, part=1).sample("person", a_batch(), 0)).any()
    assert (drawn != sampler(Side.HEAD).sample("person", a_batch(index=1), 0)).any()
    same = a_batch(((1, 1), (1, 1)))
    assert (
        sampler(Side.HEAD).sample("person", same, 0) != sampler(Side.HEAD).sample("person", same, 1)
    ).any()


def test_local_and_in_batch_shares_keep_to_the_machine_and_the_chunk() -> None:
    for part in (0, 1):
        drawn = sampler(Side.HEAD, (0.25, 0.5, 0.25), part, 400).sample("person", a_batch(), 0)
        assert set(drawn[:100]) <= set(nodes_of("person", 1))
        assert set(drawn[100:300]) == set(nodes_of("person", 1, (part,)))
        assert set(drawn[300:]) <= {1, 2, 3, 6, 7, 8}


def test_a_machine_without_the_range_draws_from_the_others() -> None:
    assert nodes_of("place", 0, (0,)) == []
    drawn = sampler(Side.TAIL, (0.0, 1.0, 0.0)).sample("place", a_batch(), 1)
    assert set(drawn) == set(nodes_of("place", 0))


def test_weights_are_proportions_inside_the_range() -> None:
    weights = {"person": np.arange(100) % 7, "place": np.zeros(8, np.int64)}
    nodes = nodes_of("person", 1)
    for shares, part, expected in (((1, 0, 0), 0, nodes), ((0, 1, 0), 1, nodes_of("person", 1, (1,)))):
        made = sampler(Side.HEAD, shares, part, 50_000, weights)
        counts = np.bincount(made.sample("person", a_batch(), 0), minlength=100)
        share = weights["person"][expected] / weights["person"][expected].sum()
        assert counts[expected].sum() == 50_000 and (counts[weights["person"] == 0] == 0).all()
        drawn = share > 0
        assert chisquare(counts[expected][drawn], 50_000 * share[drawn]).pvalue > 1e-4
    # Without weights above 0 the range is drawn from uniformly.
    places = sampler(Side.TAIL, weights=weights).sample("place", a_batch(), 1)
    assert set(places) == set(nodes_of("place", 0))
