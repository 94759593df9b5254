"""Ranks, metrics, results and protocols of a ranking."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from dglkge.errors import InputError
from dglkge.evaluation.metrics import Protocol, RankingMetrics, RankingResult, format_table, ranks
from dglkge.typing import Side


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


def test_unknown_rule():
    with pytest.raises(
        InputError, match="unknown rule for ties 'fair'; known: 'optimistic', 'pessimistic', 'realistic'"
    ):
        ranks(np.array([0]), np.array([0]), "fair")


@pytest.fixture
def result() -> RankingResult:
    """Three triples of relation 2, one of relation 0, none of relation 1."""
    return RankingResult(
        protocol=Protocol(),
        relation_labels=["knows", "never used", "visits (person → town)"],
        relation_ids=np.array([2, 0, 2, 2]),
        ranks={Side.HEAD: np.array([1.0, 8.0, 2.0, 4.0]), Side.TAIL: np.array([1.0, 1.0, 1.0, 2.0])},
        num_negatives={Side.HEAD: np.full(4, 9), Side.TAIL: np.full(4, 5)},
    )


def test_sides(result):
    assert result.head.mr == 15 / 4 and result.tail.mr == 5 / 4 and result.both.mr == 20 / 8
    assert (result.head.num_queries, result.tail.num_queries, result.both.num_queries) == (4, 4, 8)
    assert result.both.mrr == pytest.approx((result.head.mrr + result.tail.mrr) / 2)
    assert result.head.auc == pytest.approx(1 - (0 + 7 + 1 + 3) / 9 / 4)


def test_per_relation(result):
    by_relation = result.per_relation()
    assert list(by_relation) == ["knows", "visits (person → town)"]
    assert by_relation["knows"]["head"].mr == 8.0 and by_relation["knows"]["tail"].mr == 1.0
    visits = by_relation["visits (person → town)"]
    assert visits["both"].num_queries == 6 and visits["head"].mr == pytest.approx(7 / 3)
    weighted = sum(sides["both"].mrr * sides["both"].num_queries for sides in by_relation.values())
    assert weighted / 8 == pytest.approx(result.both.mrr)


def test_dictionary_is_json_and_names_the_protocol(result):
    found = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert list(found) == ["protocol", "num_triples", "both", "head", "tail", "per_relation"]
    assert found["num_triples"] == 4
    assert found["protocol"]["filtering"] == "filtered" and found["protocol"]["candidates"] == "all"
    assert found["both"]["mr"] == 2.5 and found["tail"]["hits@1"] == 0.75
    assert found["per_relation"]["knows"]["head"]["num_queries"] == 1


def test_table(result):
    assert format_table(result).splitlines() == [
        "test split, filtered, all candidates, realistic ties",
        "             mr     mrr  hits@1  hits@3  hits@10  hits@50     auc  num_queries",
        "both sides  2.5  0.6719  0.5000  0.7500   1.0000   1.0000  0.8222            8",
        "head        3.8  0.4688  0.2500  0.5000   1.0000   1.0000  0.6944            4",
        "tail        1.2  0.8750  0.7500  1.0000   1.0000   1.0000  0.9500            4",
    ]


def test_table_of_relations_starts_with_the_most_frequent(result):
    lines = format_table(result, per_relation=True).splitlines()
    assert len({len(line) for line in lines[1:]}) == 1, "columns are aligned"
    assert lines[5].startswith("visits (person → town)  ") and lines[5].endswith("6")
    assert lines[6].startswith("knows  ") and lines[6].endswith("2")


def test_names_everything_that_changes_a_figure():
    assert Protocol().describe() == "test split, filtered, all candidates, realistic ties"
    assert Protocol().to_dict() == {
        "split": "test",
        "filtering": "filtered",
        "candidates": "all",
        "ties": "realistic",
    }
    sampled = Protocol(split="valid", filtered=False, num_candidates=500, ties="pessimistic", seed=3)
    assert sampled.describe() == "valid split, raw, sampled 500 candidates, pessimistic ties"
    assert sampled.to_dict() == {
        "split": "valid",
        "filtering": "raw",
        "candidates": "sampled 500",
        "ties": "pessimistic",
        "seed": 3,
    }


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"ties": "best"}, "unknown rule for ties 'best'"),
        ({"num_candidates": 0}, r"the number of candidates must be at least 1 \(or none, for all\), got 0"),
        ({"batch_size": 0}, "the batch size of the evaluation must be at least 1, got 0"),
    ],
)
def test_out_of_range(fields, message):
    with pytest.raises(InputError, match=message):
        Protocol(**fields)
