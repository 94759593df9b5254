"""Pairs of entities with all their relations, and how trainers and machines share batches of them."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.data.dataset import Dataset
from dglkge.data.known_triples import KnownTriples
from dglkge.sampling.query_batches import PairIndex, QueryBatches, QueryIndex
from tests.toy_kg import toy_dataset


def test_the_index_has_every_pair_once_with_its_relations() -> None:
    types = [("a", "b"), ("a", "a"), ("a", "b"), ("b", "a")]
    triples = np.random.default_rng(1).integers(0, 4, (150, 3))
    index = PairIndex(triples, types)
    expected: dict[tuple[str, str, int, int], set[int]] = {}
    for h, r, t in triples.tolist():
        expected.setdefault((*types[r], h, t), set()).add(r)
    keys = [
        (*index.kinds[kind], head, tail)
        for kind, head, tail in zip(index.kind_of.tolist(), index.heads.tolist(), index.tails.tolist())
    ]
    bounds = index.starts.tolist()
    got = {key: index.answers[first:end].tolist() for key, first, end in zip(keys, bounds, bounds[1:])}
    assert keys == sorted(set(keys))
    assert got == {key: sorted(relations) for key, relations in expected.items()}
    assert index.num_answers.sum() == len(index.answers)


def test_no_triples_have_no_pairs() -> None:
    index = PairIndex(np.empty((0, 3), np.int64), [("a", "b")])
    assert len(index) == 0 and index.starts.tolist() == [0]


def batches_of(dataset: Dataset, machine: int, local_rank: int, trainers: int) -> QueryBatches:
    """Return the batches of one trainer."""
    types = [(relation.lhs, relation.rhs) for relation in dataset.relations.relations]
    triples = dataset.split("train")
    index, pairs = QueryIndex(KnownTriples([triples], len(types))), PairIndex(triples, types)
    return QueryBatches(index, dataset.layout(), types, 64, (machine, local_rank, trainers), 3, pairs)


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize(("parts", "trainers"), [(1, 1), (1, 3), (2, 2)])
def test_every_query_is_trained_once_an_epoch_in_the_same_batch(
    parts: int, trainers: int, typed: bool
) -> None:
    dataset = Dataset.open(toy_dataset(parts, typed))
    alone = batches_of(Dataset.open(toy_dataset(1, typed)), 0, 0, 1)
    shares = [batches_of(dataset, m, rank, trainers) for m in range(parts) for rank in range(trainers)]
    seen: tuple[list[int], list[int]] = ([], [])
    for number in range(len(alone)):
        whole = alone.batch(5, number)
        found = [share.batch(5, number) for share in shares]
        assert sum(map(len, found)) == whole.global_size == found[0].global_size
        for field, ids in zip(("query_ids", "pair_ids"), seen):
            numbers = np.concatenate([getattr(batch, field) for batch in found])
            assert sorted(numbers) == sorted(getattr(whole, field))
            ids += numbers.tolist()
        for share, batch in zip(shares, found):
            layout = dataset.layout()
            for run in batch.pair_runs:
                part = slice(run.start, run.end)
                pairs, ids_of_run = share.pairs, batch.pair_ids[part]
                assert pairs is not None
                assert {pairs.kinds[kind] for kind in pairs.kind_of[ids_of_run]} == {(run.lhs, run.rhs)}
                for name, nodes, ids in (
                    (run.lhs, batch.pair_heads[part], pairs.heads[ids_of_run]),
                    (run.rhs, batch.pair_tails[part], pairs.tails[ids_of_run]),
                ):
                    assert np.array_equal(np.asarray(layout.original_ids(name))[nodes], ids)
    assert alone.pairs is not None
    assert sorted(seen[0]) == list(range(len(alone.index)))
    assert sorted(seen[1]) == list(range(len(alone.pairs)))
