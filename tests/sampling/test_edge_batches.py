"""Batches from partitions: over all trainers each global batch is the same set of triples."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.data.partition_layout import EdgeTable
from dglkge.sampling import triple_order
from dglkge.sampling.edge_batches import EdgeBatches, EdgeOptions

NUM_TRIPLES, BATCH_SIZE, CHUNK_SIZE, SEED = 1003, 100, 40, 11
PAIR_OF_RELATION = np.array([0, 1, 0, 2])


def edge_tables(num_parts: int) -> list[EdgeTable]:
    """Cut triples at random into parts; head = 10 * id, tail = 10 * id + 1, so that rows can be told."""
    random = np.random.default_rng(0)
    owner = random.integers(0, num_parts, NUM_TRIPLES)
    relations = random.integers(0, len(PAIR_OF_RELATION), NUM_TRIPLES)
    tables = []
    for part in range(num_parts):
        ids = np.flatnonzero(owner == part)
        edges = np.stack([10 * ids, relations[ids], 10 * ids + 1], axis=1)
        tables.append(EdgeTable(ids, edges, (ids / 7).astype(np.float32)))
    return tables


def options(local: int, per_machine: int) -> EdgeOptions:
    """Options of a trainer."""
    return EdgeOptions(PAIR_OF_RELATION, NUM_TRIPLES, BATCH_SIZE, CHUNK_SIZE, local, per_machine, SEED)


def trainers(num_parts: int, per_machine: int) -> list[EdgeBatches]:
    """All trainers of a cluster."""
    return [
        EdgeBatches(table, options(local, per_machine))
        for table in edge_tables(num_parts)
        for local in range(per_machine)
    ]


@pytest.mark.parametrize(("num_parts", "per_machine"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_each_global_batch_is_the_window_of_the_order(num_parts: int, per_machine: int) -> None:
    everyone = trainers(num_parts, per_machine)
    assert len(everyone[0]) == 11
    seen = []
    for index in range(11):
        shares = [trainer.batch(4, index) for trainer in everyone]
        ids = np.concatenate([share.triple_ids for share in shares])
        positions = triple_order.window(index, BATCH_SIZE, NUM_TRIPLES)
        assert sorted(ids) == sorted(triple_order.inverse_permute(positions, NUM_TRIPLES, SEED, 4))
        assert {share.global_size for share in shares} == {len(positions)}
        seen.append(ids)
    assert sorted(np.concatenate(seen)) == list(range(NUM_TRIPLES))


def test_rows_belong_to_their_triples_and_groups_to_their_pairs() -> None:
    for trainer in trainers(2, 2):
        batch = trainer.batch(0, 3)
        assert (batch.heads == 10 * batch.triple_ids).all()
        assert (batch.tails == 10 * batch.triple_ids + 1).all()
        assert batch.weights is not None
        assert np.allclose(batch.weights, batch.triple_ids / 7)
        position = triple_order.permute(batch.triple_ids, NUM_TRIPLES, SEED, 0) - 3 * BATCH_SIZE
        ends = [0]
        for group in batch.groups:
            run = slice(group.start, group.end)
            assert (PAIR_OF_RELATION[batch.relations[run]] == group.pair).all()
            assert (position[run] // CHUNK_SIZE == group.chunk).all()
            assert group.start == ends[-1] < group.end
            ends.append(group.end)
        assert ends[-1] == len(batch)
        assert len({(group.pair, group.chunk) for group in batch.groups}) == len(batch.groups)


def test_trainers_of_a_machine_share_its_edges_evenly() -> None:
    shares = [len(trainer.batch(0, 0)) for trainer in trainers(1, 3)]
    assert max(shares) - min(shares) <= 1


def test_a_machine_without_edges_trains_empty_batches() -> None:
    nothing = EdgeTable(np.empty(0, np.int64), np.empty((0, 3), np.int64), None)
    batches = EdgeBatches(nothing, options(0, 1))
    batch = batches.batch(0, 0)
    assert len(batch) == 0 and batch.groups == () and batch.global_size == BATCH_SIZE
