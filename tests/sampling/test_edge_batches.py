"""Batches of edges, the index from triples to rows, and the passes of an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dglkge.data.partition_layout import EdgeTable
from dglkge.sampling import triple_order
from dglkge.sampling.edge_batches import EdgeBatches, EdgeOptions, TripleIndex

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
    return EdgeOptions(PAIR_OF_RELATION, NUM_TRIPLES, BATCH_SIZE, CHUNK_SIZE, local, per_machine, SEED)


def trainers(num_parts: int, per_machine: int) -> list[EdgeBatches]:
    return [
        EdgeBatches(table, options(local, per_machine))
        for table in edge_tables(num_parts)
        for local in range(per_machine)
    ]


@pytest.mark.parametrize(("num_parts", "per_machine"), [(1, 1), (1, 3), (3, 2)])
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


def owned(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Return a partition's triple ids out of 20,000."""
    everything = np.arange(20_000)
    return {
        "scattered": np.sort(rng.choice(everything, 5_000, replace=False)),
        "few": np.array([3, 19_999]),
        "one": np.array([0]),
        "none": np.empty(0, np.int64),
        "all": everything,
        "a run": everything[7_000:9_001],
        "two runs": np.concatenate([everything[:50], everything[19_000:]]),
    }[kind]


@pytest.mark.parametrize("kind", ["scattered", "few", "one", "none", "all", "a run", "two runs"])
def test_finds_what_a_set_finds(kind: str) -> None:
    rng = np.random.default_rng(0)
    ids = owned(kind, rng)
    wanted = np.concatenate([rng.integers(0, 20_000, 4_096), [0, 1, 19_998, 19_999], ids[:5], ids[-5:]])
    places, rows = TripleIndex(ids).find(wanted)
    row_of = {int(triple_id): row for row, triple_id in enumerate(ids)}
    expected = [(place, row_of[int(one)]) for place, one in enumerate(wanted) if int(one) in row_of]
    assert list(zip(places.tolist(), rows.tolist())) == expected


def test_ids_beyond_the_last_owned_one_are_not_there() -> None:
    places, rows = TripleIndex(np.array([4, 5])).find(np.array([6, 7, 8, 1_000_000_000_000]))
    assert len(places) == len(rows) == 0


SIZES = st.integers(min_value=1, max_value=3000)
KEYS = st.tuples(st.integers(0, 2**40), st.integers(0, 10_000))


@given(num=SIZES, key=KEYS)
def test_permute_is_a_bijection_and_its_inverse_undoes_it(num: int, key: tuple[int, int]) -> None:
    seed, epoch = key
    ids = np.arange(num)
    positions = triple_order.permute(ids, num, seed, epoch)
    assert sorted(positions.tolist()) == ids.tolist()
    assert triple_order.inverse_permute(positions, num, seed, epoch).tolist() == ids.tolist()


@given(num=SIZES, batch_size=st.integers(1, 700), key=KEYS)
def test_windows_of_an_epoch_hold_every_triple_once(num: int, batch_size: int, key: tuple[int, int]) -> None:
    batches = triple_order.num_batches(num, batch_size)
    windows = [triple_order.window(index, batch_size, num) for index in range(batches)]
    assert all(len(window) == batch_size for window in windows[:-1])
    seen = triple_order.inverse_permute(np.concatenate(windows), num, *key)
    assert sorted(seen.tolist()) == list(range(num))


def test_a_part_of_the_order_equals_the_same_part_of_the_whole() -> None:
    num = 1234
    whole = triple_order.inverse_permute(np.arange(num), num, seed=5, epoch=2)
    part = triple_order.inverse_permute(np.arange(700, 900), num, seed=5, epoch=2)
    assert part.tolist() == whole[700:900].tolist()


@pytest.mark.parametrize("num", [1000, 4096, 99_991])
def test_the_order_looks_random(num: int) -> None:
    """Neighbours in the file are not neighbours in the order, and epochs do not repeat one another."""
    ids = np.arange(num)
    first = triple_order.permute(ids, num, seed=0, epoch=0)
    second = triple_order.permute(ids, num, seed=0, epoch=1)
    other = triple_order.permute(ids, num, seed=1, epoch=0)
    limit = 5 / np.sqrt(num)  # five standard deviations of the correlation of independent orders
    for a, b in ((first, ids), (first, second), (first, other), (first[1:], first[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < limit
    # Windows draw evenly from the file: chi-square of a 20 x 20 table, 361 degrees of freedom.
    table, _, _ = np.histogram2d(ids, first, bins=20)
    expected = num / 400
    assert ((table - expected) ** 2 / expected).sum() < 361 + 5 * np.sqrt(2 * 361)
