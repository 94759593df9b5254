"""Thresholds and figures of decisions against trying everything, one pair at a time."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.errors import InputError
from dglkge.evaluation.classification import (
    ClassificationMetrics,
    ClassificationResult,
    average_precision,
    best_threshold,
    fit_thresholds,
    roc_auc,
)

scored = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=1, max_size=30).map(
    lambda rows: (np.array([s / 3 for s, _ in rows]), np.array([label for _, label in rows]))
)
of_both_kinds = scored.filter(lambda case: case[1].any() and not case[1].all())


@settings(max_examples=100, deadline=None)
@given(case=scored)
def test_no_threshold_is_better(case):
    scores, labels = case
    found = best_threshold(scores, labels)
    right = ((scores >= found) == labels).sum()
    distinct = sorted(set(scores.tolist()))
    cuts = [distinct[0], *((a + b) / 2 for a, b in zip(distinct, distinct[1:])), distinct[-1] + 1]
    correct = [((scores >= cut) == labels).sum() for cut in cuts]
    assert right == max(correct)
    lowest = cuts[correct.index(max(correct))]
    assert ((scores >= found) == (scores >= lowest)).all()


def test_threshold_between_neighbouring_numbers():
    below = 1.0
    above = float(np.nextafter(below, 2))
    assert best_threshold(np.array([above, below]), np.array([True, False])) == above


@settings(max_examples=100, deadline=None)
@given(case=of_both_kinds)
def test_areas_against_all_pairs(case):
    scores, labels = case
    pairs = list(itertools.product(scores[labels].tolist(), scores[~labels].tolist()))
    assert roc_auc(scores, labels) == pytest.approx(np.mean([(t > f) + (t == f) / 2 for t, f in pairs]))
    area, recall_before = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        called = scores >= threshold
        recall = (called & labels).sum() / labels.sum()
        area += (recall - recall_before) * (called & labels).sum() / called.sum()
        recall_before = recall
    assert average_precision(scores, labels) == pytest.approx(area)


@settings(max_examples=60, deadline=None)
@given(case=scored)
def test_figures_of_decisions(case):
    margins, labels = case
    found = ClassificationMetrics.of(margins, labels)
    table = {(c, t): 0 for c in (False, True) for t in (False, True)}
    for margin, label in zip(margins.tolist(), labels.tolist()):
        table[margin >= 0, label] += 1
    hits, called, true = table[True, True], table[True, True] + table[True, False], int(labels.sum())
    assert found.accuracy == pytest.approx((hits + table[False, False]) / len(labels))
    assert found.precision == (hits / called if called else 0)
    assert found.recall == (hits / true if true else 0)
    if hits:
        assert found.f1 == pytest.approx(2 / (1 / found.precision + 1 / found.recall))
    else:
        assert found.f1 == 0
    assert (found.num_true, found.num_false) == (true, len(labels) - true)
    assert (found.roc_auc is None) == (true in (0, len(labels)))


def test_thresholds_of_relations():
    relation_ids = np.array([0, 0, 0, 0, 2, 2, 2, 2])
    scores = np.array([1.0, 2.0, 3.0, 4.0, -4.0, -3.0, -2.0, -1.0])
    labels = np.array([False, False, True, True] * 2)
    found = fit_thresholds(relation_ids, scores, labels)
    assert found.of_relation == {0: 2.5, 2: -2.5}
    assert found.margins(np.array([2, 0, 1, 2]), np.zeros(4)).tolist() == [2.5, -2.5, -found.shared, 2.5]
    assert found.shared == best_threshold(scores, labels)
    for kind, missing in ((labels, "false"), (~labels, "true")):
        with pytest.raises(InputError, match=f"there are no {missing} ones"):
            fit_thresholds(relation_ids[kind], scores[kind], np.full(4, missing == "false"))


def test_result_by_relation():
    thresholds = fit_thresholds(np.array([1, 1]), np.array([0.0, 1.0]), np.array([False, True]))
    relation_ids = np.array([0, 1, 1, 1])
    margins, labels = np.array([-1.0, 1.0, 2.0, -1.0]), np.array([True, True, False, False])
    result = ClassificationResult(thresholds, ["a", "b", "c"], relation_ids, margins, labels, "given")
    report = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert list(report["per_relation"]) == ["b", "a"]
    assert report["per_relation"]["b"]["threshold"] == 0.5 and "threshold" not in report["per_relation"]["a"]
    assert report["per_relation"]["b"]["accuracy"] == pytest.approx(2 / 3)
    assert report["per_relation"]["a"]["roc_auc"] is None and report["accuracy"] == 0.5
    assert report["negatives"] == "given" and report["shared_threshold"] == 0.5
