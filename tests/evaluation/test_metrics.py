"""Ranks, metrics, protocols and results of a ranking; categories of relations."""

from __future__ import annotations

import itertools
import json
import runpy
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation.metrics import (
    CATEGORIES,
    UNSEEN,
    Protocol,
    RankingMetrics,
    RankingResult,
    format_table,
    ranks,
    relation_categories,
)
from dglkge.typing import Side
from tests.evaluation.toy_world import RELATIONS, assert_same, toy_world
from tests.toy_kg import REPOSITORY

NUM_RELATIONS = 4


def test_metrics_by_hand():
    metrics = RankingMetrics.of(np.array([1.0, 2.0, 4.0, 60.0]), np.array([10, 10, 10, 118]))
    mrr, auc = (1 + 1 / 2 + 1 / 4 + 1 / 60) / 4, 1 - (0 + 0.1 + 0.3 + 0.5) / 4
    expected = {"mr": 67 / 4, "mrr": pytest.approx(mrr), "auc": pytest.approx(auc), "num_queries": 4}
    hits = {"hits@1": 0.25, "hits@3": 0.5, "hits@10": 0.75, "hits@50": 0.75}
    assert metrics.to_dict() == {**expected, **hits}
    # A rank of 1.5 is no hit at 1; no negatives are a perfect AUC.
    metrics = RankingMetrics.of(np.array([1.5, 3.0, 3.5]), np.array([9, 9, 9]))
    assert metrics.hits == {1: 0.0, 3: pytest.approx(2 / 3), 10: 1.0, 50: 1.0}
    assert RankingMetrics.of(np.array([1.0]), np.array([0])).auc == 1.0


@pytest.mark.parametrize("num_greater, num_equal", [(0, 0), (0, 1), (2, 3), (1, 4)])
def test_realistic_is_the_mean_over_all_orders(num_greater, num_equal):
    """Every order of the true answer (a) among its equals (b) behind the greater ones."""
    orders = set(itertools.permutations("a" + "b" * num_equal))
    places = [num_greater + 1 + order.index("a") for order in orders]
    counts = np.array([num_greater]), np.array([num_equal])
    assert ranks(*counts, "realistic").tolist() == [pytest.approx(np.mean(places))]
    assert ranks(*counts, "optimistic").tolist() == [min(places)]
    assert ranks(*counts, "pessimistic").tolist() == [max(places)]


def labels(table):
    return [line.strip().partition("  ")[0] for line in table.splitlines()[2:]]


@pytest.fixture
def result() -> RankingResult:
    """Three triples of relation 2, one of relation 0, none of relation 1; without ties."""
    return RankingResult(
        protocol=Protocol(),
        relation_labels=["knows", "never used", "visits (person → town)"],
        relation_ids=np.array([2, 0, 2, 2]),
        num_negatives={Side.HEAD: np.full(4, 9), Side.TAIL: np.full(4, 5)},
        num_greater={Side.HEAD: np.array([0, 7, 1, 3]), Side.TAIL: np.array([0, 0, 0, 1])},
        num_equal={side: np.zeros(4, np.int64) for side in Side},
    )


def test_sides_and_relations_and_their_dictionary(result):
    assert result.head.mr == 15 / 4 and result.tail.mr == 5 / 4 and result.both.mr == 20 / 8
    assert (result.head.num_queries, result.tail.num_queries, result.both.num_queries) == (4, 4, 8)
    assert result.both.mrr == pytest.approx((result.head.mrr + result.tail.mrr) / 2)
    assert result.head.auc == pytest.approx(1 - (0 + 7 + 1 + 3) / 9 / 4)
    by_relation = result.per_relation()
    assert list(by_relation) == ["knows", "visits (person → town)"]
    assert by_relation["knows"]["head"].mr == 8.0 and by_relation["knows"]["tail"].mr == 1.0
    visits = by_relation["visits (person → town)"]
    assert visits["both"].num_queries == 6 and visits["head"].mr == pytest.approx(7 / 3)
    fields = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert list(fields) == ["protocol", "num_triples", "both", "head", "tail", "per_relation", "ties"]
    assert fields["num_triples"] == 4 and fields["protocol"] == Protocol().to_dict()
    assert fields["both"]["mr"] == 2.5 and fields["tail"]["hits@1"] == 0.75
    assert fields["per_relation"]["knows"]["head"]["num_queries"] == 1


def test_tables(result):
    lines = format_table(result, per_relation=True).splitlines()
    assert lines[:5] == [
        "test split, filtered, all candidates, realistic ties",
        "                         mr     mrr  hits@1  hits@3  hits@10  hits@50     auc  num_queries",
        "both sides              2.5  0.6719  0.5000  0.7500   1.0000   1.0000  0.8222            8",
        "head                    3.8  0.4688  0.2500  0.5000   1.0000   1.0000  0.6944            4",
        "tail                    1.2  0.8750  0.7500  1.0000   1.0000   1.0000  0.9500            4",
    ]
    assert len({len(line) for line in lines[1:]}) == 1, "columns are aligned"
    assert lines[5].startswith("both, pessimistic ties  ")
    # The most frequent relation first.
    assert lines[6].startswith("visits (person → town)  ") and lines[6].endswith("6")
    assert lines[7].startswith("knows  ") and lines[7].endswith("2") and len(lines) == 8
    assert repr(result) == f"RankingResult({lines[0]}: 4 triples, MRR 0.6719, Hits@1 0.5000, Hits@10 1.0000)"
    table = result._repr_html_()
    assert table.startswith(f"{lines[0]}<table")
    assert table.count("<tr") == 1 + 3 and "<td>0.6719</td>" in table


def test_a_protocol_names_everything_that_changes_a_figure():
    sampled = Protocol(split="valid", filtered=False, num_candidates=500, ties="pessimistic", seed=3)
    for protocol, split, filtering, candidates, ties, more in [
        (Protocol(), "test", "filtered", "all", "realistic", {}),
        (sampled, "valid", "raw", "sampled 500", "pessimistic", {"seed": 3}),
        (Protocol(filtered=False, given=True), "test", "raw", "given", "realistic", {}),
    ]:
        assert protocol.describe() == f"{split} split, {filtering}, {candidates} candidates, {ties} ties"
        fields = {"split": split, "filtering": filtering, "candidates": candidates, "ties": ties}
        assert protocol.to_dict() == {**fields, **more}
    assert protocol.suffix() == "-given"


def test_protocols_that_cannot_be():
    for fields, message in [
        ({"ties": "best"}, "unknown rule for ties 'best'; known: 'optimistic', 'pessimistic', 'realistic'"),
        ({"num_candidates": 0}, r"the number of candidates must be at least 1 \(or none, for all\), got 0"),
        ({"batch_size": 0}, "the batch size of the evaluation must be at least 1, got 0"),
        ({"given": True}, "neither filtered nor sampled"),
        ({"given": True, "filtered": False, "num_candidates": 3}, "neither filtered nor sampled"),
    ]:
        with pytest.raises(InputError, match=message):
            Protocol(**fields)


some_triples = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, NUM_RELATIONS - 1), st.integers(0, 3)), max_size=40
).map(lambda rows: np.array(rows, dtype=np.int64).reshape(-1, 3))


@settings(max_examples=80)
@given(triples=some_triples)
@example(triples=np.array([[0, 0, 1], [1, 0, 2], [1, 0, 3]]))  # exactly 1.5 tails of a head
def test_categories_equal_counting_with_sets(triples):
    categories = relation_categories(triples, NUM_RELATIONS)
    distinct = {tuple(row) for row in triples.tolist()}
    for relation in range(NUM_RELATIONS):
        pairs = [(head, tail) for head, r, tail in distinct if r == relation]
        if not pairs:
            assert categories.names[relation] == UNSEEN
            assert np.isnan([categories.tails_per_head[relation], categories.heads_per_tail[relation]]).all()
            continue
        tails_per_head = len(pairs) / len({head for head, _ in pairs})
        heads_per_tail = len(pairs) / len({tail for _, tail in pairs})
        assert categories.tails_per_head[relation] == tails_per_head
        assert categories.heads_per_tail[relation] == heads_per_tail
        many = {False: "1", True: "N"}
        name = f"{many[heads_per_tail >= 1.5]}-{many[tails_per_head >= 1.5]}"
        assert categories.names[relation] == name and name in CATEGORIES


def test_rules_for_ties_come_from_one_ranking():
    world = toy_world("distmult", reciprocal=False, seed=3, grid=True)
    known = KnownTriples([world.known], len(RELATIONS))
    result = world.evaluate(Protocol(), 3, known)
    for ties in ("realistic", "optimistic", "pessimistic"):
        changed = result.with_ties(ties)
        assert changed.protocol.ties == ties
        assert_same(changed, world.evaluate(Protocol(ties=ties), 2, known))
    by_ties = json.loads(json.dumps(result.to_dict()["ties"]))
    assert list(by_ties) == ["realistic", "pessimistic"]
    sides = ("both", "head", "tail")
    assert by_ties["realistic"] == {name: result.metrics(name).to_dict() for name in sides}
    assert by_ties["pessimistic"]["tail"] == result.with_ties("pessimistic").tail.to_dict()
    assert by_ties["pessimistic"]["both"]["mrr"] < by_ties["realistic"]["both"]["mrr"], "the case has ties"
    assert labels(format_table(result)) == ["both sides", "head", "tail", "both, pessimistic ties"]
    other = labels(format_table(result.with_ties("optimistic")))
    assert other[3:] == ["both, realistic ties", "both, pessimistic ties"]


def test_metrics_of_categories_are_those_of_their_relations(result):
    categories = relation_categories(np.array([[0, 0, 0], [1, 0, 0], [2, 0, 0]]), 3)
    assert categories.names == ["N-1", UNSEEN, UNSEEN]
    result = replace(result, categories=categories)
    per_category, per_relation = result.per_category(), result.per_relation()
    assert per_category == {"N-1": per_relation["knows"], UNSEEN: per_relation["visits (person → town)"]}
    report = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert report["per_category"]["N-1"]["head"] == per_category["N-1"]["head"].to_dict()
    category = {"category": "N-1", "tails_per_head": 1.0, "heads_per_tail": 3.0}
    assert report["relation_categories"] == {"knows": category}


def test_tables_by_relation_category_and_side(result):
    result = replace(result, categories=relation_categories(np.array([[0, 0, 0], [1, 0, 0]]), 3))
    used = ["visits (person → town)", "knows"]  # the most frequent relation first
    for by, expected in [
        ([], []),
        (["side"], []),
        (["relation"], used),
        (["category"], ["N-1", UNSEEN]),
        (["relation", "side"], [name + side for name in used for side in ("", ", head", ", tail")]),
    ]:
        assert labels(format_table(result, by=by))[4:] == expected
    assert format_table(result, by=["relation"]) == format_table(result, per_relation=True)
    with pytest.raises(InputError, match="unknown way of dividing the queries 'type'; known: 'category'"):
        format_table(result, by=["type"])


def test_the_benchmark_of_the_evaluation_agrees_with_its_plain_loop(monkeypatch, tmp_path):
    path = str(REPOSITORY / "benchmarks" / "evaluation.py")
    script, output = runpy.run_path(path), tmp_path / "figures.json"
    script["main"].__globals__["PRODUCT_SECONDS"] = 0.01
    sizes = "--num-entities 300 --num-triples 50 --num-relations 4 --dim 8 --num-threads 1"
    monkeypatch.setattr(sys, "argv", [path, *sizes.split(), "--markdown", "--output", str(output)])
    script["main"]()
    figures = json.loads(output.read_text())
    assert figures["num_queries"] == 100
    assert figures["mrr"] == pytest.approx(figures["plain_loop_mrr"], abs=1e-5)
