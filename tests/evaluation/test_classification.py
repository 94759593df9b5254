"""Thresholds, figures of decisions and drawn false triples against trying everything, one pair at a time."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation import classification
from dglkge.evaluation.classification import best_threshold, draw_corruptions, fit_thresholds, seen_entities
from dglkge.typing import Relation, Side

scored = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=1, max_size=30).map(
    lambda rows: (np.array([s / 3 for s, _ in rows]), np.array([label for _, label in rows]))
)


@given(case=scored)
def test_no_threshold_is_better(case):
    scores, labels = case
    threshold = best_threshold(scores, labels)
    right = ((scores >= threshold) == labels).sum()
    distinct = sorted(set(scores.tolist()))
    cuts = [distinct[0], *((a + b) / 2 for a, b in zip(distinct, distinct[1:])), distinct[-1] + 1]
    correct = [((scores >= cut) == labels).sum() for cut in cuts]
    assert right == max(correct)
    lowest = cuts[correct.index(max(correct))]
    assert ((scores >= threshold) == (scores >= lowest)).all()


def test_threshold_between_neighbouring_numbers():
    above = float(np.nextafter(1.0, 2))
    assert best_threshold(np.array([above, 1.0]), np.array([True, False])) == above


@given(case=scored.filter(lambda case: case[1].any() and not case[1].all()))
def test_areas_against_all_pairs(case):
    scores, labels = case
    pairs = itertools.product(scores[labels].tolist(), scores[~labels].tolist())
    mean = np.mean([(t > f) + (t == f) / 2 for t, f in pairs])
    assert classification.roc_auc(scores, labels) == pytest.approx(mean)
    area, recall_before = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        called = scores >= threshold
        recall = (called & labels).sum() / labels.sum()
        area += (recall - recall_before) * (called & labels).sum() / called.sum()
        recall_before = recall
    assert classification.average_precision(scores, labels) == pytest.approx(area)


@settings(max_examples=60)
@given(case=scored)
def test_figures_of_decisions(case):
    margins, labels = case
    metrics = classification.ClassificationMetrics.of(margins, labels)
    called, true = margins >= 0, int(labels.sum())
    hits = int((called & labels).sum())
    assert metrics.accuracy == pytest.approx((called == labels).mean())
    assert metrics.precision == (hits / called.sum() if called.any() else 0)
    assert metrics.recall == (hits / true if true else 0)
    f1 = 2 / (1 / metrics.precision + 1 / metrics.recall) if hits else 0
    assert metrics.f1 == pytest.approx(f1)
    assert (metrics.num_true, metrics.num_false) == (true, len(labels) - true)
    assert (metrics.roc_auc is None) == (true in (0, len(labels)))


def test_thresholds_of_relations():
    relation_ids = np.array([0, 0, 0, 0, 2, 2, 2, 2])
    scores = np.array([1.0, 2.0, 3.0, 4.0, -4.0, -3.0, -2.0, -1.0])
    labels = np.array([False, False, True, True] * 2)
    thresholds = fit_thresholds(relation_ids, scores, labels)
    assert thresholds.by_relation == {0: 2.5, 2: -2.5}
    margins = thresholds.margins(np.array([2, 0, 1, 2]), np.zeros(4))
    assert margins.tolist() == [2.5, -2.5, -thresholds.shared, 2.5]
    assert thresholds.shared == best_threshold(scores, labels)
    for kind, missing in ((labels, "false"), (~labels, "true")):
        with pytest.raises(InputError, match=f"there are no {missing} ones"):
            fit_thresholds(relation_ids[kind], scores[kind], np.full(4, missing == "false"))


def test_result_by_relation():
    thresholds = fit_thresholds(np.array([1, 1]), np.array([0.0, 1.0]), np.array([False, True]))
    relation_ids = np.array([0, 1, 1, 1])
    margins, labels = np.array([-1.0, 1.0, 2.0, -1.0]), np.arange(4) < 2
    columns = relation_ids, margins, labels
    result = classification.ClassificationResult(thresholds, ["a", "b", "c"], *columns, "given")
    report = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert list(report["per_relation"]) == ["b", "a"]
    assert report["per_relation"]["b"]["threshold"] == 0.5 and "threshold" not in report["per_relation"]["a"]
    assert report["per_relation"]["b"]["accuracy"] == pytest.approx(2 / 3)
    assert report["per_relation"]["a"]["roc_auc"] is None and report["accuracy"] == 0.5
    assert report["negatives"] == "given" and report["shared_threshold"] == 0.5


RELATIONS = [Relation("knows", "person", "person"), Relation("visits", "person", "town")]
SIZES = {"person": 9, "town": 4}
DATASET = SimpleNamespace(relations=RELATIONS, num_entities=SIZES.__getitem__)

A_TRIPLE = st.tuples(st.integers(0, 8), st.integers(0, 1), st.integers(0, 3))
some_triples = st.lists(A_TRIPLE, min_size=1, max_size=40).map(lambda rows: np.array(rows, dtype=np.int64))


def allowed(triple, side, known, pool) -> list[int]:
    """List by hand what may replace one end of a triple."""
    entities = []
    for entity in pool:
        corrupted = list(triple)
        corrupted[side.column] = entity
        if entity != triple[side.column] and tuple(corrupted) not in known:
            entities.append(int(entity))
    return entities


@settings(max_examples=80)
@given(triples=some_triples, more=some_triples, with_pools=st.booleans(), seed=st.integers(0, 99))
@pytest.mark.parametrize("side", Side)
def test_draws_are_unknown(side, triples, more, with_pools, seed):
    known = {tuple(row) for row in more.tolist()}
    pools = seen_entities(more) if with_pools else None
    index = KnownTriples([more], len(RELATIONS))
    corruptions = draw_corruptions(triples, side, 3, DATASET, index, (seed,), pools)
    undrawn = corruptions.tolist()
    for triple in triples.tolist():
        pool = sorted({row[side.column] for row in more.tolist() if row[1] == triple[1]})
        here = allowed(triple, side, known, pool) if with_pools else []
        here = here or allowed(triple, side, known, range(SIZES[RELATIONS[triple[1]].candidate_type(side)]))
        drawn, undrawn = (undrawn[:3], undrawn[3:]) if here else ([], undrawn)
        assert all(row[side.column] in here for row in drawn)
        for column in (1, side.anchor_column):
            assert all(row[column] == triple[column] for row in drawn)
    assert not undrawn


def test_pools_and_sides_of_draws():
    pools = seen_entities(np.array([[3, 0, 1], [2, 0, 1], [3, 0, 0], [5, 1, 2]]))
    assert [pools[relation, Side.HEAD].tolist() for relation in (0, 1)] == [[2, 3], [5]]
    assert [pools[relation, Side.TAIL].tolist() for relation in (0, 1)] == [[0, 1], [2]]
    sides, other = (classification.draw_sides(10_000, (3, name)) for name in ("valid", "tested"))
    assert abs(sides.mean() - 0.5) < 0.02
    assert np.array_equal(sides[:50], classification.draw_sides(50, (3, "valid")))
    assert not np.array_equal(sides, other)


def test_draws_are_uniform_and_repeatable():
    triples = np.array([[0, 0, 4], [1, 1, 2]])
    known = KnownTriples([np.array([[0, 0, 1], [0, 0, 8], [0, 0, 4]])], 2)
    draw = [draw_corruptions(triples, Side.TAIL, 30_000, DATASET, known, (s, "x")) for s in (1, 1, 2)]
    assert np.array_equal(draw[0], draw[1])
    assert not np.array_equal(draw[0], draw[2])
    for relation, options in enumerate(([0, 2, 3, 5, 6, 7], [0, 1, 3])):
        tails = draw[0][draw[0][:, 1] == relation, 2]
        counts = [(tails == option).sum() for option in options]
        assert sum(counts) == len(tails) == 30_000
        assert chisquare(counts).pvalue > 0.003
