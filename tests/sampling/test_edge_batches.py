"""Batches of edges, the index from triples to rows, and the passes of an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dglkge.sampling import triple_order
from dglkge.sampling.edge_batches import TripleIndex
from dglkge.sampling.triple_order import EdgeSet, TripleOrder
from tests.sampling.test_machine_batches import BATCH_SIZE, NUM_TRIPLES, SEED, SETS, edge_tables, trainers_of


@pytest.mark.parametrize(
    ("num_parts", "per_machine", "in_sets"), [(1, 1, False), (1, 3, True), (3, 2, False), (2, 2, True)]
)
def test_each_global_batch_is_the_window_of_the_order(num_parts, per_machine, in_sets):
    order = TripleOrder(SETS if in_sets else [EdgeSet("train", range(NUM_TRIPLES))], SEED, 0.1 * in_sets)
    everyone = sum(trainers_of(edge_tables(num_parts), per_machine, order, by_machine=False), [])
    assert len(everyone[0]) == -(-order.num_positions // BATCH_SIZE)
    for index in range(len(everyone[0])):
        shares = [trainer.batch(4, index) for trainer in everyone]
        ids = np.concatenate([share.triple_ids for share in shares])
        positions = triple_order.window(index, BATCH_SIZE, order.num_positions)
        assert sorted(ids) == sorted(order.triple_ids(positions, 4))
        assert {share.global_size for share in shares} == {len(positions)}


def test_trainers_of_a_machine_share_its_edges_evenly() -> None:
    shares = [len(trainer.batch(0, 0)) for trainer in trainers_of(edge_tables(1), 3, by_machine=False)[0]]
    assert max(shares) - min(shares) <= 1


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
