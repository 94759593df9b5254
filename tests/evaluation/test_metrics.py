"""Ranks, metrics, protocols and results of a ranking; categories of relations."""

from __future__ import annotations

import itertools
import json
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

NUM_RELATIONS = 4


def test_metrics_by_hand():
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
    """Return the labels of a table's rows; its columns are aligned."""
    lines = table.splitlines()[1:]
    assert len({len(line) for line in lines}) == 1
    return [line.strip().partition("  ")[0] for line in lines[1:]]


def made(labels, relation_ids, head_ranks, tail_ranks, num_heads, num_tails) -> RankingResult:
    """Return a result without ties."""
    sides = dict(zip(Side, (head_ranks, tail_ranks)))
    return RankingResult(
        protocol=Protocol(),
        relation_labels=labels,
        relation_ids=np.array(relation_ids),
        num_negatives={s: np.full(len(relation_ids), n) for s, n in zip(Side, (num_heads, num_tails))},
        num_greater={side: np.array(ranks) - 1 for side, ranks in sides.items()},
        num_equal={side: np.zeros(len(ranks), np.int64) for side, ranks in sides.items()},
    )


@pytest.fixture
def result() -> RankingResult:
    """Three triples of relation 2, one of relation 0, none of relation 1."""
    labels = ["knows", "never used", "visits (person → town)"]
    return made(labels, [2, 0, 2, 2], [1, 8, 2, 4], [1, 1, 1, 2], 9, 5)


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
    weighted = sum(sides["both"].mrr * sides["both"].num_queries for sides in by_relation.values())
    assert weighted / 8 == pytest.approx(result.both.mrr)
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


def test_what_a_person_sees_of_a_result():
    result = made(["likes"], [0, 0], [1, 2], [1, 4], 9, 9)
    protocol = "test split, filtered, all candidates, realistic ties"
    assert repr(result) == f"RankingResult({protocol}: 2 triples, MRR 0.6875, Hits@1 0.5000, Hits@10 1.0000)"
    table = result._repr_html_()
    assert table.startswith(f"{protocol}<table")
    assert table.count("<tr") == 1 + 3 and "<td>0.6875</td>" in table


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


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"ties": "best"}, "unknown rule for ties 'best'; known: 'optimistic', 'pessimistic', 'realistic'"),
        ({"num_candidates": 0}, r"the number of candidates must be at least 1 \(or none, for all\), got 0"),
        ({"batch_size": 0}, "the batch size of the evaluation must be at least 1, got 0"),
        ({"given": True}, "neither filtered nor sampled"),
        ({"given": True, "filtered": False, "num_candidates": 3}, "neither filtered nor sampled"),
    ],
)
def test_protocols_that_cannot_be(fields, message):
    with pytest.raises(InputError, match=message):
        Protocol(**fields)


some_triples = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, NUM_RELATIONS - 1), st.integers(0, 3)), max_size=40
).map(lambda rows: np.array(rows, dtype=np.int64).reshape(-1, 3))


@settings(max_examples=80, deadline=None)
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


def world_of_both_relations():
    worlds = (toy_world("complex", reciprocal=True, seed=seed) for seed in range(50))
    return next(world for world in worlds if len(set(world.triples[:, 1].tolist())) == 2)


def test_metrics_of_categories_are_those_of_their_relations():
    world = world_of_both_relations()
    categories = relation_categories(np.array([[0, 0, 0], [1, 0, 0], [2, 0, 0]]), len(RELATIONS))
    assert categories.names == ["N-1", UNSEEN]
    result = replace(world.evaluate(Protocol(filtered=False)), categories=categories)
    per_category = result.per_category()
    assert set(world.triples[:, 1]) == {0, 1} and list(per_category) == ["N-1", UNSEEN]
    for name, relation in (("N-1", 0), (UNSEEN, 1)):
        mine = np.flatnonzero(world.triples[:, 1] == relation)
        for side in Side:
            expected = RankingMetrics.of(result.ranks[side][mine], result.num_negatives[side][mine])
            assert per_category[name][side.value] == expected
        assert per_category[name]["both"].num_queries == 2 * len(mine)
    report = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert report["per_category"]["N-1"]["head"] == per_category["N-1"]["head"].to_dict()
    assert report["relation_categories"] == {
        "knows": {"category": "N-1", "tails_per_head": 1.0, "heads_per_tail": 3.0}
    }


def test_tables_by_relation_category_and_side():
    world = world_of_both_relations()
    categories = relation_categories(world.known, len(RELATIONS))
    result = replace(world.evaluate(Protocol(filtered=False)), categories=categories)

    def labels_by(*by):
        return labels(format_table(result, by=by))[4:]

    by_count = sorted(
        ("knows", "visits"), key=lambda name: -(world.triples[:, 1] == (name == "visits")).sum()
    )
    assert labels_by() == [] == labels_by("side")
    assert labels_by("relation") == by_count
    assert labels_by("category") == list(result.per_category())
    assert labels_by("relation", "side") == [
        line for name in by_count for line in (name, f"{name}, head", f"{name}, tail")
    ]
    assert format_table(result, by=["relation"]) == format_table(result, per_relation=True)
    with pytest.raises(InputError, match="unknown way of dividing the queries 'type'; known: 'category'"):
        format_table(result, by=["type"])
