"""Figures of ranks, by hand and against a ROC curve."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.evaluation.metrics import RankingMetrics


def test_by_hand():
    metrics = RankingMetrics.of(np.array([1.0, 2.0, 4.0, 60.0]), np.array([10, 10, 10, 118]))
    assert metrics.to_dict() == {
        "mr": 67 / 4,
        "mrr": pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 60) / 4),
        "hits@1": 0.25,
        "hits@3": 0.5,
        "hits@10": 0.75,
        "hits@50": 0.75,
        "auc": pytest.approx(1 - (0 + 0.1 + 0.3 + 0.5) / 4),
        "num_queries": 4,
    }


def test_realistic_halves_at_the_edge():
    """A rank of 1.5 is no hit at 1."""
    metrics = RankingMetrics.of(np.array([1.5, 3.0, 3.5]), np.array([9, 9, 9]))
    assert metrics.hits == {1: 0.0, 3: pytest.approx(2 / 3), 10: 1.0, 50: 1.0}


def test_auc_is_the_share_of_pairs_in_the_right_order():
    random = np.random.default_rng(0)
    scores = random.integers(0, 9, size=(30, 41)).astype(float)
    true, others = scores[:, :1], scores[:, 1:]
    found = RankingMetrics.of(1.0 + (others > true).sum(1) + (others == true).sum(1) / 2, np.full(30, 40))
    pairs = (true > others) + 0.5 * (true == others)
    assert found.auc == pytest.approx(pairs.mean())


def test_no_negatives_is_a_perfect_auc():
    assert RankingMetrics.of(np.array([1.0]), np.array([0])).auc == 1.0


def test_figures_are_plain_numbers():
    for value in RankingMetrics.of(np.array([1.0]), np.array([3])).to_dict().values():
        assert type(value) in (int, float)
