"""Figures of both sides, of each, and of each relation; as a dictionary and as a table."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dglkge.evaluation.metrics import Protocol, RankingResult, format_table
from dglkge.typing import Side


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


def test_what_a_person_sees(result):
    assert repr(result) == (
        "RankingResult(test split, filtered, all candidates, realistic ties: 4 triples, "
        "MRR 0.6719, Hits@1 0.5000, Hits@10 1.0000)"
    )
    table = result._repr_html_()
    assert table.startswith("test split, filtered, all candidates, realistic ties<table")
    assert table.count("<tr") == 1 + 3 and "<td>0.6719</td>" in table
