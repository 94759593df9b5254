"""Scores in mixed buckets: with the offset the graph's own frequencies are a minimum of the loss."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from dglkge.data.range_walk import range_bounds
from dglkge.model.losses import LOSSES, Logistic, Softmax
from dglkge.sampling.range_negatives import NodeRanges, range_offset

NUM_RANGES, OF_RANGE = 4, 3
RANGES = np.repeat(np.arange(NUM_RANGES), OF_RANGE)


def test_ranges_are_those_of_the_own_machine():
    starts = np.array([0, 7, 12])
    ranges = NodeRanges({"word": range_bounds(starts, 3)}, 3)("word", np.array([11, 0, 1, 2, 6, 7, 8, 9, 10]))
    assert ranges.tolist() == [2, 0, 0, 1, 2, 0, 1, 1, 2]


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
    names = {name for name in LOSSES if LOSSES.get(name).takes_log_odds}
    assert names == {"softmax", "logistic", "bce", "self_adversarial"}

    class Mine(Logistic):
        """A subclass may compute anything."""

    assert not Mine.takes_log_odds
