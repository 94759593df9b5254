"""Probabilities against plain descent, closed forms, and all monotone curves."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from dglkge.errors import InputError
from dglkge.evaluation import calibration
from dglkge.evaluation.calibration import PRIOR_SCORES, Isotonic, Platt, balanced_weights, fit_by_relation
from dglkge.typing import Side

A_CASE = st.tuples(st.integers(-6, 6), st.booleans(), st.integers(1, 4))
CASES = st.lists(A_CASE, min_size=1, max_size=25).map(lambda rows: tuple(map(np.array, zip(*rows))))
"""Scores, labels and weights."""


def drawn(num_scores: int, slope: float, offset: float, seed: int = 0):
    """Draw scores, and labels of which each is true with the probability of its score."""
    random = np.random.default_rng(seed)
    scores = random.normal(3, 5, num_scores)
    return scores, random.random(num_scores) < 1 / (1 + np.exp(-(slope * scores + offset)))


def minimum(loss):
    """Descend from elsewhere by scipy, without derivatives; return slope and offset."""
    options = {"method": "Nelder-Mead", "tol": 1e-10}
    return minimize(lambda curve: float(loss(*curve.tolist())), [0.1, 0.3], **options).x.tolist()


def entropy(logits, targets, weights=None, reduction="mean"):
    targets, weights = (None if array is None else torch.from_numpy(array) for array in (targets, weights))
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, weights, reduction=reduction)


@settings(max_examples=60)
@given(case=CASES)
def test_isotonic_is_the_best_monotone_curve(case):
    """The value at each point is max over starts of min over ends of the means (Barlow et al. 1972, 1.9)."""
    scores, labels, weights = case[0] / 2, case[1], case[2] / 2
    curve = Isotonic.fit(scores, labels, weights)
    points = sorted(set(scores.tolist()))

    def mean(first, last):
        in_block = (scores >= points[first]) & (scores <= points[last])
        return float((weights * labels)[in_block].sum() / weights[in_block].sum())

    for place, point in enumerate(points):
        ends = range(place, len(points))
        expected = max(min(mean(first, last) for last in ends) for first in range(place + 1))
        assert curve(np.array([point])).tolist() == [pytest.approx(expected, abs=1e-12)]
    assert curve(np.array([-100.0, 100.0])).tolist() == [curve.values[0], curve.values[-1]]
    assert (np.diff(curve.values) >= 0).all() and (np.diff(curve.scores) > 0).all()


def test_isotonic_by_hand():
    curve = Isotonic.fit(np.array([1.0, 2, 3, 4, 5]), np.array([0, 1, 0, 1, 1], bool), np.ones(5))
    expected = [0.0, 0.0, 0.25, 0.5, 0.5, 0.5, 0.75, 1.0, 1.0]
    assert curve(np.array([0.0, 1, 1.5, 2, 2.5, 3, 3.5, 4, 9])).tolist() == expected


@pytest.mark.parametrize("shift", [0.0, 1e4])
@pytest.mark.parametrize("rate", [0.5, 0.05])
def test_platt_is_the_minimum(rate, shift):
    scores, labels = drawn(400, 0.8, -1.0)
    weights = balanced_weights(labels, rate)
    curve = Platt.fit(scores + shift, labels, weights)
    num_true, num_false = weights[labels].sum(), weights[~labels].sum()
    targets = np.where(labels, (num_true + 1) / (num_true + 2), 1 / (num_false + 2))

    def loss(slope, offset):
        return entropy(slope * torch.from_numpy(scores) + offset, targets, weights, "sum")

    slope, offset = minimum(loss)
    assert curve.slope == pytest.approx(slope, rel=1e-5)
    assert curve.offset == pytest.approx(offset - slope * shift, rel=1e-5)


def test_separable_and_equal_scores_have_a_finite_fit():
    labels = np.array([True, True, False, False])
    for scores in (np.array([2.0, 3, -2, -3]), np.ones(4)):
        curve = Platt.fit(scores, labels, np.ones(4))
        assert np.isfinite([curve.slope, curve.offset]).all()
    assert Platt.fit(np.ones(4), labels, np.ones(4))(np.ones(1)).tolist() == [pytest.approx(0.5)]
    assert Platt(3.0, 0.0)(np.array([-1e5, 1e5])).tolist() == [0.0, 1.0]
    assert Platt(0.5, 0.7)(np.array([2.0])).tolist() == [pytest.approx(1 / (1 + math.exp(-1.7)))]


@pytest.mark.parametrize("method", sorted(calibration.METHODS))
def test_weights_are_repetitions_and_json_keeps_all(method, tmp_path):
    scores, labels = drawn(300, 0.6, 0.0, seed=1)
    repeats = np.random.default_rng(2).integers(1, 4, 300)
    weighted = calibration.METHODS[method].fit(scores, labels, repeats.astype(float))
    columns = (np.repeat(column, repeats) for column in (scores, labels, np.ones(300)))
    repeated = calibration.METHODS[method].fit(*columns)
    at = np.linspace(-20, 20, 101)
    np.testing.assert_allclose(weighted(at), repeated(at), atol=1e-7)
    curves = {(3, Side.HEAD): Platt(0.5, -1.0)}
    fitted = calibration.Calibration(method, weighted, 0.5, 10, 0, 100, 200, "run", 1, 30, curves)
    (tmp_path / "calibration.json").write_text(json.dumps(fitted.to_dict()))
    again = calibration.Calibration.load(tmp_path / "calibration.json")
    assert np.array_equal(again.curve(at), weighted(at))
    assert replace(again, curve=weighted) == fitted


def test_curves_by_relation_come_near_the_true_probabilities():
    """Scores whose true probabilities are known: relations differ, and some have few triples."""
    random = np.random.default_rng(5)
    slopes, offsets = np.exp(random.normal(0, 0.5, 40)), random.normal(0, 2, 40)
    sizes = random.permutation(np.repeat([6, 60, 600, 3000], 10))
    relation = np.repeat(np.arange(40), sizes)
    scores = random.normal(0, 2, len(relation))
    truth = 1 / (1 + np.exp(-(slopes[relation] * scores + offsets[relation])))
    labels = random.random(len(truth)) < truth
    queries = np.stack([np.arange(len(truth)) // 6, relation, np.zeros_like(relation)], axis=1)
    # As the curves assume it, half of a relation's triples are true: the odds change by its own share.
    share = (np.bincount(relation, labels) / sizes)[relation]
    even = truth * (1 - share) / (truth * (1 - share) + (1 - truth) * share)
    common = Platt.fit(scores, labels, balanced_weights(labels, 0.5))
    prior_scores, curves = fit_by_relation(scores, labels, queries, common)
    assert prior_scores in PRIOR_SCORES[:3]  # they differ much
    fitted = calibration.Calibration("platt", common, 0.5, 1, 0, 1, 1, "run", 1, prior_scores, curves)
    probabilities = fitted.probabilities(scores, relation, Side.HEAD)
    assert np.array_equal(fitted.probabilities(scores, relation, Side.TAIL), common(scores))
    for size, most in ((6, 1.0), (60, 0.8), (600, 0.5), (3000, 0.3)):
        is_sized = (sizes[relation] == size) & (share > 0) & (share < 1)
        error, before = (np.square(p - even)[is_sized].mean() for p in (probabilities, common(scores)))
        assert error < most * before


def test_relations_that_do_not_differ_keep_the_common_curve():
    scores, labels = drawn(4000, 0.5, 0.0)
    queries = np.stack([np.arange(4000), np.arange(4000) % 100, np.ones(4000, int)], axis=1)
    common = Platt.fit(scores, labels, balanced_weights(labels, 0.5))
    prior_scores, curves = fit_by_relation(scores, labels, queries, common)
    assert prior_scores == PRIOR_SCORES[-1] and len(curves) == 100
    at = np.linspace(-10, 10, 21)
    assert max(np.abs(curve(at) - common(at)).max() for curve in curves.values()) < 0.05


def test_without_a_fold_to_leave_out_the_common_curve_counts_most():
    common = Platt(1.0, 0.0)
    queries = np.array([[0, 0, 0], [0, 0, 0]])  # one query: all its scores are in one fold
    prior_scores, curves = fit_by_relation(np.array([2.0, 1.0]), np.array([True, False]), queries, common)
    assert prior_scores == PRIOR_SCORES[-1] and list(curves) == [(0, Side.HEAD)]
    assert fit_by_relation(np.array([1.0]), np.array([True]), queries[:1], common) == (PRIOR_SCORES[-1], {})


def test_a_shrunk_curve_is_the_minimum_and_never_falls():
    """By a descent on the two terms apart: the relation's own scores, and the prior's."""
    scores, labels = drawn(60, 0.8, -1.0)
    prior, weights = 1 / (1 + np.exp(-0.3 * scores)), balanced_weights(labels, 0.5)
    curve = Platt.shrunk(scores, labels, prior, 30)

    def loss(slope, offset):
        logits = slope * torch.from_numpy(scores) + offset
        return entropy(logits, labels * 1.0, weights, "sum") + 30 * entropy(logits, prior)

    assert [curve.slope, curve.offset] == pytest.approx(minimum(loss), rel=1e-5)
    even = curve(scores)
    assert curve.at_rate(0.2)(scores) == pytest.approx(0.2 * even / (0.2 * even + 0.8 * (1 - even)))
    assert Platt.shrunk(scores, ~labels, prior, 0.1).slope == 0


def test_weights_give_the_share():
    labels = np.array([True] * 3 + [False] * 30)
    weights = balanced_weights(labels, 0.2)
    assert weights[labels].sum() / weights.sum() == pytest.approx(0.2) and weights.mean() == pytest.approx(1)
    with pytest.raises(InputError, match="there are no false ones"):
        balanced_weights(np.array([True]), 0.5)


def test_quality():
    random = np.random.default_rng(0)
    probabilities = np.concatenate([random.random(200), [0.0, 1.0, 1.0]])
    labels = np.concatenate([random.random(200) < 0.4, [True, True, False]])
    weights = random.random(203) + 0.1
    metrics = calibration.calibration_metrics(probabilities, labels, weights)
    brier = np.average((probabilities - labels) ** 2, weights=weights)
    assert metrics["brier_score"] == pytest.approx(brier)
    likelihood = np.maximum(np.where(labels, probabilities, 1 - probabilities), 1e-15)
    log_loss = np.average(-np.log(likelihood), weights=weights)
    assert metrics["log_loss"] == pytest.approx(log_loss, rel=1e-3)
    bins = np.minimum((probabilities * 10).astype(int), 9)
    gaps = np.bincount(bins, weights * (probabilities - labels))
    assert metrics["expected_calibration_error"] == pytest.approx(np.abs(gaps).sum() / weights.sum())
