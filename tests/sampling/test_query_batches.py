"""Distinct queries, their answers, and how trainers and machines share batches of them."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.data.dataset import Dataset
from dglkge.data.known_triples import KnownTriples
from dglkge.sampling import query_batches
from dglkge.sampling.query_batches import PairIndex, QueryBatches, QueryIndex, ShardAnswers
from dglkge.typing import Side
from tests.toy_kg import toy_dataset


def answers_of(index: QueryIndex) -> list[list[int]]:
    query_answers, next_query = [], 0
    for first, end, answers in index.blocks():
        assert first == next_query < end
        next_query = end
        bounds = index.starts[first : end + 1] - index.starts[first]
        query_answers += [answers[a:b].tolist() for a, b in zip(bounds, bounds[1:])]
    assert next_query == len(index)
    return query_answers


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_the_index_has_every_query_once_with_its_answers(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_batches, "BLOCK_ANSWERS", block)
    triples = np.random.default_rng(1).integers(0, 9, (300, 3))
    index = QueryIndex(KnownTriples([triples], 9))
    got, answers = {}, answers_of(index)
    ids = np.arange(len(index))
    groups = index.groups(ids)
    assert index.group_sizes().tolist() == np.bincount(groups, minlength=18).tolist()
    for i, group, anchor in zip(ids.tolist(), groups.tolist(), index.anchors(ids).tolist()):
        key = (*divmod(group, 9), anchor)
        assert key not in got
        got[key] = answers[i]
    expected: dict[tuple[int, int, int], set[int]] = {}
    for h, r, t in triples.tolist():
        expected.setdefault((0, r, h), set()).add(t)
        expected.setdefault((1, r, t), set()).add(h)
    assert got == {key: sorted(answers) for key, answers in expected.items()}
    assert list(got) == sorted(got)
    assert len(QueryIndex(KnownTriples([], 1))) == 0


def test_answers_of_a_shard() -> None:
    triples = np.random.default_rng(2).integers(0, 20, (200, 3)) % [20, 3, 20]
    index = QueryIndex(KnownTriples([triples], 3))
    node_ids = np.random.default_rng(3).permutation(20)
    is_asked = index.groups(np.arange(len(index))) < 3
    shard = ShardAnswers(index, is_asked, node_ids, first=5, stop=12)
    answers = answers_of(index)
    query_ids = np.random.default_rng(4).choice(np.flatnonzero(is_asked), 9, replace=False)
    starts, places = shard.of(query_ids)
    for i, query in enumerate(query_ids.tolist()):
        nodes = node_ids[answers[query]]
        expected = sorted(nodes[(nodes >= 5) & (nodes < 12)] - 5)
        assert sorted(places[starts[i] : starts[i + 1]].tolist()) == expected
    assert shard.of(query_ids[:0])[0].tolist() == [0]
    assert not len(shard.of(np.flatnonzero(~is_asked))[1])


def test_the_index_has_every_pair_once_with_its_relations() -> None:
    types = [("a", "b"), ("a", "a"), ("a", "b"), ("b", "a")]
    triples = np.random.default_rng(1).integers(0, 4, (150, 3))
    index = PairIndex(triples, types)
    expected: dict[tuple[str, str, int, int], set[int]] = {}
    for h, r, t in triples.tolist():
        expected.setdefault((*types[r], h, t), set()).add(r)
    columns = zip(index.kind_of.tolist(), index.heads.tolist(), index.tails.tolist())
    keys = [(*index.kinds[kind], head, tail) for kind, head, tail in columns]
    bounds = index.starts.tolist()
    got = {key: index.answers[first:end].tolist() for key, first, end in zip(keys, bounds, bounds[1:])}
    assert keys == sorted(set(keys))
    assert got == {key: sorted(relations) for key, relations in expected.items()}
    assert index.starts[-1] == len(index.answers)
    assert PairIndex(np.empty((0, 3), np.int64), types).starts.tolist() == [0]


def batches_of(dataset: Dataset, machine: int, local_rank: int, trainers: int) -> QueryBatches:
    types = [(relation.lhs, relation.rhs) for relation in dataset.relations.relations]
    triples = dataset.split("train")
    index, pairs = QueryIndex(KnownTriples([triples], len(types))), PairIndex(triples, types)
    return QueryBatches(index, dataset.layout(), types, 64, (machine, local_rank, trainers), 3, pairs)


@pytest.mark.parametrize(
    ("parts", "trainers", "typed"), [(1, 1, False), (1, 3, True), (2, 2, False), (2, 2, True)]
)
def test_every_query_is_trained_once_an_epoch_in_the_same_batch(parts, trainers, typed):
    dataset = Dataset.open(toy_dataset(parts, typed))
    alone = batches_of(Dataset.open(toy_dataset(1, typed)), 0, 0, 1)
    shares = [batches_of(dataset, m, rank, trainers) for m in range(parts) for rank in range(trainers)]
    seen: tuple[list[int], list[int]] = ([], [])
    for number in range(len(alone)):
        whole = alone.batch(5, number)
        batches = [share.batch(5, number) for share in shares]
        assert sum(map(len, batches)) == whole.global_size == batches[0].global_size
        for field, ids in zip(("runs", "pair_runs"), seen):
            numbers = [number for batch in batches for run in getattr(batch, field) for number in run.ids]
            assert sorted(numbers) == sorted(number for run in getattr(whole, field) for number in run.ids)
            ids += numbers
        for share, batch in zip(shares, batches):
            for run in batch.runs:
                sides = share.index.groups(run.ids) // share.index.num_relations
                assert set(sides.tolist()) == {0 if run.side is Side.TAIL else 1}
                assert share.asks_for(run.answer_type)[run.ids].all()
            layout = dataset.layout()
            for run in batch.pair_runs:
                pairs = share.pairs
                assert {pairs.kinds[kind] for kind in pairs.kind_of[run.ids]} == {(run.lhs, run.rhs)}
                for name, nodes, ids in (
                    (run.lhs, run.heads, pairs.heads[run.ids]),
                    (run.rhs, run.tails, pairs.tails[run.ids]),
                ):
                    assert np.array_equal(np.asarray(layout.original_ids(name))[nodes], ids)
    assert alone.pairs is not None
    assert sorted(seen[0]) == list(range(len(alone.index)))
    assert sorted(seen[1]) == list(range(len(alone.pairs)))
