"""Negatives of buckets, and the offset with which the graph's own frequencies are a minimum of the loss."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from dglkge.data.range_walk import range_bounds
from dglkge.model.losses import LOSSES, Logistic, Softmax
from dglkge.sampling.edge_batches import EdgeBatch, EdgeGroup
from dglkge.sampling.range_negatives import NodeRanges, RangeNegatives, range_offset
from dglkge.typing import Side

STARTS = {"person": np.array([0, 60, 100]), "place": np.array([0, 3, 8])}
PAIRS = [("person", "person"), ("person", "place")]
NUM_RANGES = 4
BOUNDS = {name: range_bounds(starts, NUM_RANGES) for name, starts in STARTS.items()}


def a_batch(ranges: tuple[tuple[int, int], ...] = ((1, 3), (2, 0)), index: int = 0) -> EdgeBatch:
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


def expect_shares(drawn: np.ndarray, nodes: list[int], weights: np.ndarray) -> None:
    """Hold that some nodes, and no others, are drawn in proportion to their weights."""
    counts = np.bincount(drawn, minlength=100)
    nodes = [node for node in nodes if weights[node]]
    assert counts.sum() == counts[nodes].sum() == len(drawn)
    assert chisquare(counts[nodes], len(drawn) * weights[nodes] / weights[nodes].sum()).pvalue > 1e-4


@pytest.mark.parametrize(("side", "ranges"), [(Side.HEAD, (1, 2)), (Side.TAIL, (3, 0))])
def test_each_side_has_its_range_on_all_machines(side: Side, ranges: tuple[int, int]) -> None:
    """Uniformly or by weights; without weights above 0 uniformly."""
    weights = {"person": np.arange(100) % 7, "place": np.zeros(8, np.int64)}
    for chunk, number in enumerate(ranges):
        drawn = sampler(side, number=20_000).sample("person", a_batch(), chunk)
        expect_shares(drawn, nodes_of("person", number), np.ones(100))
        for shares, part, parts in (((1, 0, 0), 0, (0, 1)), ((0, 1, 0), 1, (1,))):
            drawn = sampler(side, shares, part, 50_000, weights).sample("person", a_batch(), chunk)
            expect_shares(drawn, nodes_of("person", number, parts), weights["person"])
    places = sampler(side, weights=weights).sample("place", a_batch(), 1)
    assert set(places) == set(nodes_of("place", ranges[1]))


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
                expect_shares(drawn, nodes, np.ones(100) if scale is None else weights["person"])


def test_trainers_of_a_machine_agree_and_machines_and_batches_do_not() -> None:
    same = a_batch(((1, 1), (1, 1)))

    def draw(batch: EdgeBatch, chunk: int = 0, part: int = 0) -> list[int]:
        return sampler(Side.HEAD, part=part).sample("person", batch, chunk).tolist()

    drawn = draw(a_batch())
    assert drawn == draw(a_batch())
    assert drawn not in (draw(a_batch(), part=1), draw(a_batch(index=1)))
    assert draw(same, 0) != draw(same, 1)


def test_local_and_in_batch_shares_keep_to_the_machine_and_the_chunk() -> None:
    """A machine without the range draws from the others."""
    for part in (0, 1):
        drawn = sampler(Side.HEAD, (0.25, 0.5, 0.25), part, 400).sample("person", a_batch(), 0)
        assert set(drawn[:100]) <= set(nodes_of("person", 1))
        assert set(drawn[100:300]) == set(nodes_of("person", 1, (part,)))
        assert set(drawn[300:]) <= {1, 2, 3, 6, 7, 8}
    assert nodes_of("place", 0, (0,)) == []
    drawn = sampler(Side.TAIL, (0.0, 1.0, 0.0)).sample("place", a_batch(), 1)
    assert set(drawn) == set(nodes_of("place", 0))


def test_ranges_are_those_of_the_own_machine():
    bounds = {"word": range_bounds(np.array([0, 7, 12]), 3)}
    ranges = NodeRanges(bounds, 3)("word", np.array([11, 0, 1, 2, 6, 7, 8, 9, 10]))
    assert ranges.tolist() == [2, 0, 0, 1, 2, 0, 1, 1, 2]


RANGES = np.repeat(np.arange(NUM_RANGES), 3)


def gradient(loss, scores, shares, anchor_range, other, offset):
    """Return the gradient of the expected loss in one bucket; all other answers in it are negatives."""
    here = np.flatnonzero(np.isin(RANGES, (anchor_range, other)))
    leaf = torch.from_numpy(scores).requires_grad_()
    lowered = leaf - offset * torch.from_numpy(RANGES == anchor_range).double()
    total = torch.zeros((), dtype=torch.float64)
    for answer in here:
        share = shares[answer] * (1 / (NUM_RANGES - 1) if RANGES[answer] == anchor_range else 1.0)
        negatives = lowered[torch.from_numpy(here[here != answer])]
        total = total + share * loss(lowered[answer][None], negatives[None])[0]
    total.backward()
    return leaf.grad.numpy()


def test_the_true_frequencies_are_a_minimum_in_each_bucket():
    shares = np.random.default_rng(1).dirichlet(np.ones(len(RANGES)))
    scores = np.log(shares)
    for anchor_range, other in itertools.permutations(range(NUM_RANGES), 2):
        slope = gradient(Softmax(), scores, shares, anchor_range, other, range_offset(NUM_RANGES))
        np.testing.assert_allclose(slope, 0, atol=1e-12)
        # Without it answers in the own range are moved down, and those in the other one up.
        slope = gradient(Softmax(), scores, shares, anchor_range, other, 0.0)
        assert (slope[anchor_range == RANGES] > 1e-4).all() and (slope[other == RANGES] < -1e-4).all()


def test_logistic_loss_has_the_offset_as_log_odds():
    """Each answer for itself: true ones at their rate in the bucket, as many times false as it is drawn."""
    share, drawn, offset = 0.02, 0.3, range_offset(NUM_RANGES)
    score = torch.tensor([np.log(share / drawn)], dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.softplus
    for rate, lowered in ((share, score), (share / (NUM_RANGES - 1), score - offset)):
        (rate * loss(-lowered) + drawn * loss(lowered)).sum().backward()
        assert abs(score.grad.item()) < 1e-12


def test_losses_say_whether_scores_are_log_odds():
    """A subclass may compute anything, and so does not inherit it."""
    names = {name for name in LOSSES if LOSSES.get(name).takes_log_odds}
    assert names == {"softmax", "logistic", "bce", "self_adversarial"}
    assert not type("Mine", (Logistic,), {}).takes_log_odds
