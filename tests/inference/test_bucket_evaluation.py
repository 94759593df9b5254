"""Evaluation bucket by bucket: every triple once, and the ranks of the evaluation in one go."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge import open_run
from dglkge.errors import InputError
from dglkge.evaluation.metrics import Protocol
from dglkge.typing import Side


def test_buckets_then_edge_sets_then_all(folder, dataset):
    run = open_run(folder)
    results = list(run.evaluate_buckets(["valid", "test"], num_ranges=2))
    names = [name for name, bucket, _ in results if bucket is None]
    assert names == ["valid", "test", None]
    for name in ("valid", "test"):
        whole = run.evaluate(name)
        places = [place for place, result in enumerate(results) if result.edge_set == name]
        assert places == list(range(places[0], places[-1] + 1))
        buckets = [results[place].bucket for place in places[:-1]]
        assert buckets == sorted(set(buckets)) and len(buckets) > 1
        # Every triple is in the bucket of its own ids, with the rank of the evaluation in one go.
        half = {}
        for kind in dataset.entity_types:
            half[kind] = dataset.num_entities(kind) // 2
        expected: dict[tuple[int, int], list[tuple[int, float, float]]] = {}
        for place, (head, relation_id, tail) in enumerate(dataset.split(name).tolist()):
            relation = dataset.relations[relation_id]
            bucket = (int(head >= half[relation.lhs]), int(tail >= half[relation.rhs]))
            ranks = (whole.ranks[Side.HEAD][place], whole.ranks[Side.TAIL][place])
            expected.setdefault(bucket, []).append((relation_id, *ranks))
        for place in places[:-1]:
            result = results[place].result
            rows = zip(result.relation_ids.tolist(), result.ranks[Side.HEAD], result.ranks[Side.TAIL])
            assert list(rows) == expected.pop(results[place].bucket)
            assert result.protocol.split == name
        assert not expected
        assert results[places[-1]].result.to_dict() == whole.to_dict()
    both = [run.evaluate(name).both for name in ("valid", "test")]
    last = results[-1].result.both
    assert last.num_queries == sum(metrics.num_queries for metrics in both)
    assert last.mrr == pytest.approx(
        sum(metrics.mrr * metrics.num_queries for metrics in both) / last.num_queries
    )
    assert results[-1].result.protocol.split == "valid+test"


def test_results_come_one_by_one(folder, dataset):
    ranked = []
    results = open_run(folder).evaluate_buckets("test", Protocol(filtered=False), 2, ranked.append)
    assert not ranked
    first = next(results)
    assert sum(ranked) == first.result.both.num_queries < 2 * len(dataset.split("test"))


def test_triples_of_the_caller(folder, dataset):
    """They are true: ranked one by one or together, none counts against another."""
    triples = np.concatenate([dataset.split("test")[:3], [[0, dataset.split("test")[0, 1], 0]]])
    run = open_run(folder)
    *_, whole, everything = run.evaluate_buckets({"mine": triples}, num_ranges=3)
    expected = run.evaluate(Protocol(split="mine"), triples, also_known=[triples])
    assert whole.edge_set == "mine" and whole.result.to_dict() == expected.to_dict()
    assert everything.result.both == whole.result.both


@pytest.mark.parametrize(
    ("edge_sets", "num_ranges", "message"),
    [
        ("tset", 1, "unknown edge set 'tset'; did you mean 'test'"),
        ([], 1, "there is no edge set to rank"),
        ({"mine": np.empty((0, 3), np.int64)}, 1, "the edge set 'mine' has no triples"),
        ("test", 0, "num_ranges must be at least 1, got 0"),
    ],
)
def test_mistakes_are_errors_before_anything_is_ranked(folder, edge_sets, num_ranges, message):
    with pytest.raises(InputError, match=message):
        open_run(folder).evaluate_buckets(edge_sets, num_ranges=num_ranges)
