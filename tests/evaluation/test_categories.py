"""Categories of relations against counting with sets, and in the metrics."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation.metrics import (
    CATEGORIES,
    UNSEEN,
    Protocol,
    RankingMetrics,
    format_table,
    ranks,
    relation_categories,
)
from dglkge.typing import Side
from tests.evaluation.toy_world import RELATIONS, toy_world

NUM_RELATIONS = 4


def world_of_both_relations():
    worlds = (toy_world("complex", reciprocal=True, seed=seed) for seed in range(50))
    return next(world for world in worlds if len(set(world.triples[:, 1].tolist())) == 2)


some_triples = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, NUM_RELATIONS - 1), st.integers(0, 3)), max_size=40
).map(lambda rows: np.array(rows, dtype=np.int64).reshape(-1, 3))


@settings(max_examples=80, deadline=None)
@given(triples=some_triples)
def test_equals_counting_with_sets(triples):
    found = relation_categories(triples, NUM_RELATIONS)
    distinct = {tuple(row) for row in triples.tolist()}
    for relation in range(NUM_RELATIONS):
        pairs = [(head, tail) for head, r, tail in distinct if r == relation]
        if not pairs:
            assert found.names[relation] == UNSEEN
            assert np.isnan(found.tails_per_head[relation]) and np.isnan(found.heads_per_tail[relation])
            continue
        tails_per_head = len(pairs) / len({head for head, _ in pairs})
        heads_per_tail = len(pairs) / len({tail for _, tail in pairs})
        assert found.tails_per_head[relation] == tails_per_head
        assert found.heads_per_tail[relation] == heads_per_tail
        many = {False: "1", True: "N"}
        name = f"{many[heads_per_tail >= 1.5]}-{many[tails_per_head >= 1.5]}"
        assert found.names[relation] == name and name in CATEGORIES


def test_limit_belongs_to_many():
    """Two heads with one and two tails: exactly 1.5 tails of a head."""
    triples = np.array([[0, 0, 1], [1, 0, 2], [1, 0, 3]])
    assert relation_categories(triples, 1).names == ["1-N"]


def test_rules_for_ties_come_from_one_ranking():
    world = toy_world("distmult", reciprocal=False, seed=3, grid=True)
    known = KnownTriples([world.known], len(RELATIONS))
    result = world.evaluate(Protocol(), 3, known)
    rules = ("realistic", "optimistic", "pessimistic")
    for ties in rules:
        expected = world.evaluate(Protocol(ties=ties), 2, known)
        found = result.with_ties(ties)
        assert found.protocol.ties == ties
        for side in Side:
            counts = [world.brute_force(side, triple, True)[:2] for triple in world.triples]
            greater, equal = np.array(counts).T
            assert found.ranks[side].tolist() == ranks(greater, equal, ties).tolist()
            assert found.ranks[side].tolist() == expected.ranks[side].tolist()
    found = json.loads(json.dumps(result.to_dict()["ties"]))
    assert list(found) == ["realistic", "pessimistic"]
    assert found["realistic"] == {
        sides: result.metrics(sides).to_dict() for sides in ("both", "head", "tail")
    }
    assert found["pessimistic"]["tail"] == result.with_ties("pessimistic").tail.to_dict()
    assert found["pessimistic"]["both"]["mrr"] < found["realistic"]["both"]["mrr"], "the case has ties"
    lines = format_table(result).splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == [
        *("both sides", "head", "tail", "both, pessimistic ties")
    ]
    other = format_table(result.with_ties("optimistic")).splitlines()
    assert [line.split("  ")[0] for line in other[5:]] == ["both, realistic ties", "both, pessimistic ties"]


def test_without_counts_there_are_no_other_rules():
    world = toy_world("distmult", reciprocal=False)
    result = replace(world.evaluate(Protocol(filtered=False)), num_greater=None, num_equal=None)
    assert "ties" not in result.to_dict() and result.with_ties("realistic") is result
    with pytest.raises(ValueError, match="need the counts"):
        result.with_ties("pessimistic")


def test_metrics_of_categories_are_those_of_their_relations():
    world = world_of_both_relations()
    categories = relation_categories(np.array([[0, 0, 0], [1, 0, 0], [2, 0, 0]]), len(RELATIONS))
    assert categories.names == ["N-1", UNSEEN]
    result = replace(world.evaluate(Protocol(filtered=False)), categories=categories)
    per_category = result.per_category()
    assert set(world.triples[:, 1]) == {0, 1} and list(per_category) == ["N-1", UNSEEN]
    for name, relation in (("N-1", 0), (UNSEEN, 1)):
        mine = [place for place, triple in enumerate(world.triples) if triple[1] == relation]
        for side in Side:
            expected = RankingMetrics.of(
                np.array([result.ranks[side][place] for place in mine]),
                np.array([result.num_negatives[side][place] for place in mine]),
            )
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

    def labels(*by):
        lines = format_table(result, by=by).splitlines()
        assert len({len(line) for line in lines[1:]}) == 1, "columns are aligned"
        return [
            line[2:].partition("  ")[0] if line[0] == " " else line.partition("  ")[0] for line in lines[6:]
        ]

    by_count = sorted(
        ("knows", "visits"), key=lambda name: -(world.triples[:, 1] == (name == "visits")).sum()
    )
    assert labels() == [] == labels("side")
    assert labels("relation") == by_count
    assert labels("category") == list(result.per_category())
    assert labels("relation", "side") == [
        line for name in by_count for line in (name, f"{name}, head", f"{name}, tail")
    ]
    assert format_table(result, by=["relation"]) == format_table(result, per_relation=True)
    with pytest.raises(InputError, match="unknown way of dividing the queries 'type'; known: 'category'"):
        format_table(result, by=["type"])
