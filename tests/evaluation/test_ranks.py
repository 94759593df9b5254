"""Ranks and their rules for ties, against sorting."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dglkge.errors import InputError
from dglkge.evaluation.metrics import ranks


@pytest.mark.parametrize("ties, expected", [("optimistic", 3.0), ("realistic", 4.5), ("pessimistic", 6.0)])
def test_three_equals(ties, expected):
    assert ranks(np.array([2]), np.array([3]), ties).tolist() == [expected]


@pytest.mark.parametrize("num_greater, num_equal", [(0, 0), (0, 1), (2, 3), (1, 4)])
def test_realistic_is_the_mean_over_all_orders(num_greater, num_equal):
    """Every order of the true answer (a) among its equals (b) behind the greater ones."""
    orders = set(itertools.permutations("a" + "b" * num_equal))
    places = [num_greater + 1 + order.index("a") for order in orders]
    counts = np.array([num_greater]), np.array([num_equal])
    assert ranks(*counts, "realistic").tolist() == [pytest.approx(np.mean(places))]
    assert ranks(*counts, "optimistic").tolist() == [min(places)]
    assert ranks(*counts, "pessimistic").tolist() == [max(places)]


def test_without_ties_all_rules_agree():
    greater = np.arange(5)
    for ties in ("optimistic", "realistic", "pessimistic"):
        found = ranks(greater, np.zeros(5, np.int64), ties)
        assert found.dtype == np.float64 and found.tolist() == [1, 2, 3, 4, 5]


def test_unknown_rule():
    with pytest.raises(
        InputError, match="unknown rule for ties 'fair'; known: 'optimistic', 'pessimistic', 'realistic'"
    ):
        ranks(np.array([0]), np.array([0]), "fair")
