"""Batches of edges, in the order of the graph and of each machine; the index from triples to rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dglkge.data.partition_layout import EdgeTable
from dglkge.sampling import edge_batches, triple_order
from dglkge.sampling.edge_batches import (
    TRIPLES_A_GROUP,
    EdgeBatches,
    EdgeOptions,
    MachineBatches,
    TripleIndex,
    cut_at,
    rows_of_sets,
)
from dglkge.sampling.negatives import MixedNegatives
from dglkge.sampling.triple_order import EdgeSet, Pass, TripleOrder, plan_passes

NUM_TRIPLES, BATCH_SIZE, CHUNK_SIZE, SEED = 1003, 100, 20, 11
PAIR_OF_RELATION = np.array([0, 1, 0, 2])
PAIRS = [("person", "person"), ("person", "place"), ("place", "place")]
TYPES, NUM_NODES = ("person", "place"), 4000

SCATTERED = np.flatnonzero(np.arange(300) % 3).astype(np.int64)
SETS = [EdgeSet("b", SCATTERED), EdgeSet("a", range(400, 1003)), EdgeSet("none", range(0))]


def an_order(in_sets: bool, held_out: float = 0.1) -> TripleOrder:
    """Return the order of all triples, or of sets without those that are held out."""
    if in_sets:
        return TripleOrder(SETS, SEED, held_out)
    return TripleOrder([EdgeSet("all", range(NUM_TRIPLES))], SEED)


@pytest.mark.parametrize(
    ("num_parts", "per_machine", "in_sets"), [(1, 1, False), (1, 3, True), (3, 2, False), (2, 2, True)]
)
@pytest.mark.parametrize("pairs", [PAIR_OF_RELATION, 0 * PAIR_OF_RELATION], ids=["types", "one_type"])
def test_each_global_batch_is_the_window_of_the_order(num_parts, per_machine, in_sets, pairs):
    """Trainers of a machine share its edges evenly, or its groups, of which none is divided."""
    order = an_order(in_sets)
    machines = trainers_of(edge_tables(num_parts), per_machine, order, by_machine=False, pairs=pairs)
    num_batches = len(machines[0][0])
    assert num_batches == -(-order.num_positions // BATCH_SIZE)
    for index in range(num_batches):
        shares = [[trainer.batch(4, index) for trainer in machine] for machine in machines]
        for of_machine in shares:
            if not pairs.any():
                assert np.ptp([len(share) for share in of_machine]) <= 1
                continue
            groups = [(group.chunk, group.pair) for share in of_machine for group in share.groups]
            assert len(groups) == len(set(groups))
            costs = [len(share) + TRIPLES_A_GROUP * len(share.groups) for share in of_machine]
            # Each of the two cuts around a run is at the bound that is nearest.
            assert np.ptp(costs) <= 2 * (TRIPLES_A_GROUP + CHUNK_SIZE)
        batches = sum(shares, [])
        positions = triple_order.window(index, BATCH_SIZE, order.num_positions)
        ids = np.concatenate([batch.triple_ids for batch in batches])
        assert sorted(ids) == sorted(order.triple_ids(positions, 4))
        assert {batch.global_size for batch in batches} == {len(positions)}


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 9))
def test_trainers_get_groups_of_about_the_same_cost(sizes, trainers):
    bounds = np.cumsum([0, *sizes])
    cuts = [cut_at(bounds, turn / trainers) for turn in range(trainers + 1)]
    assert cuts == sorted(cuts) and (cuts[0], cuts[-1]) == (0, sum(sizes))
    for cut in cuts:
        distance = min(abs(bound - cut) for bound in bounds.tolist())
        assert distance == 0 or distance >= TRIPLES_A_GROUP
    even = (sum(sizes) + TRIPLES_A_GROUP * len(sizes)) / trainers
    for start, end in itertools.pairwise(cuts):
        groups = sum(start < high and low < end for low, high in itertools.pairwise(bounds.tolist()))
        assert abs(end - start + TRIPLES_A_GROUP * groups - even) <= 4 * TRIPLES_A_GROUP


TRIPLES = np.arange(20_000)
SCATTERED_IDS = np.flatnonzero(np.random.default_rng(0).random(20_000) < 0.25)
SOME_IDS = [SCATTERED_IDS, TRIPLES[:1], TRIPLES[:0], TRIPLES, np.r_[TRIPLES[:50], TRIPLES[19_000:]]]


@pytest.mark.parametrize("ids", SOME_IDS, ids=len)
def test_finds_what_a_set_finds(ids: np.ndarray) -> None:
    random = np.random.default_rng(1).integers(0, 20_000, 4_096)
    queries = np.concatenate([random, [0, 1, 19_998, 19_999, 10**12], ids[:5], ids[-5:]])
    places, rows = TripleIndex(ids).find(queries)
    row_of = {int(triple_id): row for row, triple_id in enumerate(ids)}
    expected = [(place, row_of[int(id_)]) for place, id_ in enumerate(queries) if int(id_) in row_of]
    assert list(zip(places.tolist(), rows.tolist())) == expected


@given(st.integers(1, 3000), st.integers(1, 700), st.tuples(st.integers(0, 2**40), st.integers(0, 10_000)))
def test_windows_cover_an_order_that_can_be_inverted(num, batch_size, key):
    ids = np.arange(num)
    positions = triple_order.permute(ids, num, *key)
    assert sorted(positions.tolist()) == ids.tolist()
    assert triple_order.inverse_permute(positions, num, *key).tolist() == ids.tolist()
    batches = triple_order.num_batches(num, batch_size)
    windows = [triple_order.window(index, batch_size, num) for index in range(batches)]
    assert all(len(window) == batch_size for window in windows[:-1])
    assert np.concatenate(windows).tolist() == ids.tolist()


@pytest.mark.parametrize("num", [1000, 4096, 99_991])
def test_the_order_looks_random(num: int) -> None:
    """Neighbours in the file are not neighbours in the order, and epochs do not repeat one another."""
    ids = np.arange(num)
    keys = ((0, 0), (0, 1), (1, 0))
    first, second, other = (triple_order.permute(ids, num, seed, epoch) for seed, epoch in keys)
    limit = 5 / np.sqrt(num)  # five standard deviations of the correlation of independent orders
    for a, b in ((first, ids), (first, second), (first, other), (first[1:], first[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < limit
    # Windows draw evenly from the file: chi-square of a 20 x 20 table, 361 degrees of freedom.
    table, _, _ = np.histogram2d(ids, first, bins=20)
    expected = num / 400
    assert ((table - expected) ** 2 / expected).sum() < 361 + 5 * np.sqrt(2 * 361)


def edge_tables(num_parts: int, even: bool = False) -> list[EdgeTable]:
    """Cut triples at random into parts of growing or equal size; head = 4 id, tail = 4 id + 1."""
    random = np.random.default_rng(0)
    weights = np.ones(num_parts) if even else np.arange(1.0, num_parts + 1)
    owner = random.choice(num_parts, NUM_TRIPLES, p=weights / weights.sum())
    relations = random.integers(0, len(PAIR_OF_RELATION), NUM_TRIPLES)
    tables = []
    for part in range(num_parts):
        ids = np.flatnonzero(owner == part)
        edges = np.stack([4 * ids, relations[ids], 4 * ids + 1], axis=1)
        tables.append(EdgeTable(ids, edges, (ids / 7).astype(np.float32)))
    return tables


def trainers_of(
    tables: Sequence[EdgeTable],
    per_machine: int,
    order: Any = None,
    size: int = BATCH_SIZE,
    by_machine=True,
    pairs=PAIR_OF_RELATION,
) -> list[list[EdgeBatches]]:
    order = order or an_order(in_sets=False)
    rows = [rows_of_sets(order, table.triple_ids) for table in tables]
    counts = np.array([[len(set_rows) for set_rows in part_rows] for part_rows in rows])
    sizes = (sum(len(table.triple_ids) for table in tables), size, CHUNK_SIZE)
    machines: list[list[EdgeBatches]] = [[] for _ in tables]
    for (part, table), local in itertools.product(enumerate(tables), range(per_machine)):
        options = EdgeOptions(pairs, *sizes, local, per_machine, SEED, order=order)
        if by_machine:
            machines[part].append(MachineBatches(table, rows[part], counts, part, 1, options))
        else:
            machines[part].append(EdgeBatches(table, options))
    return machines


def triples_of(machines: list[list[EdgeBatches]], epoch: int, index: int) -> list[list[int]]:
    return [
        [id_ for trainer in machine for id_ in trainer.batch(epoch, index).triple_ids.tolist()]
        for machine in machines
    ]


@pytest.mark.parametrize(
    ("num_parts", "per_machine", "in_sets"),
    [(1, 1, False), (1, 3, True), (2, 1, True), (3, 2, False), (4, 3, True)],
)
def test_an_epoch_has_each_triple_once_in_proportional_shares(num_parts, per_machine, in_sets, monkeypatch):
    monkeypatch.setattr(edge_batches, "ROWS_A_BLOCK", 7)
    order, tables = an_order(in_sets), edge_tables(num_parts)
    # A range without held-out triples takes no list.
    assert isinstance(rows_of_sets(order, tables[0].triple_ids)[0], range) == (not in_sets)
    machines = trainers_of(tables, per_machine, order)
    held = {id_ for number in range(len(order.sets)) for id_ in order.held_out(number).tolist()}
    sets = [set(part.at(np.arange(len(part.triple_ids))).tolist()) - held for part in order.sets]
    bounds = np.cumsum([0, *map(len, sets)])
    assert len(machines[0][0]) == -(-bounds[-1] // BATCH_SIZE)
    for epoch in (0, 3):
        seen: list[int] = []
        for index in range(len(machines[0][0])):
            shares = triples_of(machines, epoch, index)
            batch = sum(shares, [])
            sizes = {trainer.batch(epoch, index).global_size for machine in machines for trainer in machine}
            assert sizes == {len(batch)}
            start, end = index * BATCH_SIZE, min((index + 1) * BATCH_SIZE, int(bounds[-1]))
            for table, share in zip(tables, shares):
                assert set(share) <= set(table.triple_ids.tolist())
                expected = 0.0
                for number, members in enumerate(sets):
                    overlap = max(0, min(end, bounds[number + 1]) - max(start, bounds[number]))
                    num_here = len(members & set(table.triple_ids.tolist()))
                    expected += overlap * num_here / max(1, len(members))
                    assert overlap or not members & set(share)
                assert abs(len(share) - expected) < len(sets)
            seen += batch
        assert len(seen) == len(set(seen)) and set(seen) == set().union(*sets)


def test_orders_differ_between_epochs_seeds_and_machines() -> None:
    tables = edge_tables(2, even=True)
    first, second = (
        [triples_of(trainers_of(tables, 1), epoch, index) for index in range(11)] for epoch in (0, 1)
    )
    assert first != second
    # Two machines with as many triples have them in orders of their own.
    size = min(len(table.triple_ids) for table in tables)
    even = [EdgeTable(table.triple_ids[:size], table.edges[:size], None) for table in tables]
    places = []
    for part, table in enumerate(even):
        (trainer,) = trainers_of(even, 1, an_order(in_sets=False))[part]
        ids = sum((trainer.batch(0, index).triple_ids.tolist() for index in range(11)), [])
        places.append(np.searchsorted(table.triple_ids, ids).tolist())
    assert places[0] != places[1] and sorted(places[0]) == sorted(places[1]) != places[0]


def negatives(num_parts: int, part: int) -> MixedNegatives:
    """Return the sampler of a machine: half of its negatives are of the whole graph, half its own."""
    node_ids = {name: np.arange(NUM_NODES) for name in TYPES}
    own = (NUM_NODES * part // num_parts, NUM_NODES * (part + 1) // num_parts)
    return MixedNegatives(12, (0.5, 0.5, 0), node_ids, dict.fromkeys(TYPES, own), PAIRS, SEED)


@pytest.mark.parametrize("num_parts", [2, 3])
def test_chunks_and_their_negatives_do_not_depend_on_the_number_of_trainers(num_parts: int) -> None:
    def chunks(per_machine: int, index: int) -> dict:
        members: dict = {}
        for part, machine in enumerate(trainers_of(edge_tables(num_parts), per_machine)):
            sampler = negatives(num_parts, part)
            for trainer in machine:
                batch = trainer.batch(2, index)
                for group in batch.groups:
                    ids = batch.triple_ids[group.start : group.end].tolist()
                    drawn = tuple(sampler.sample(PAIRS[group.pair][1], batch, group.chunk).tolist())
                    members.setdefault((part, group.chunk, group.pair, drawn), set()).update(ids)
        return members

    for index in range(11):
        alone = chunks(1, index)
        assert chunks(2, index) == alone and chunks(3, index) == alone
        sizes: dict = {}
        for (part, chunk, _, _), ids in alone.items():
            sizes.setdefault(chunk, []).append((part, len(ids)))
        # No chunk has positives of two machines, and numbers are those of the batch from 0 on.
        assert sorted(sizes) == list(range(len(sizes)))
        assert all(len({part for part, _ in parts}) == 1 for parts in sizes.values())
        assert all(sum(num for _, num in parts) <= CHUNK_SIZE * 9 / 8 + 1 for parts in sizes.values())
        # No two chunks have the same negatives, on whatever machine they are.
        drawn = {(chunk, negative) for _, chunk, _, negative in alone}
        assert len({negative for _, negative in drawn}) == len(drawn)


@pytest.mark.parametrize("by_machine", [True, False])
def test_rows_belong_to_their_triples_and_groups_to_their_pairs(by_machine: bool) -> None:
    order = TripleOrder(SETS, SEED, 0.2) if by_machine else None
    for trainer in sum(trainers_of(edge_tables(2), 2, order, by_machine=by_machine), []):
        batch, ends = trainer.batch(0, 3), [0]
        assert len(batch) and (batch.heads == 4 * batch.triple_ids).all()
        assert (batch.tails == 4 * batch.triple_ids + 1).all()
        assert batch.weights is not None and np.allclose(batch.weights, batch.triple_ids / 7)
        position = triple_order.permute(batch.triple_ids, NUM_TRIPLES, SEED, 0) - 3 * BATCH_SIZE
        for group in batch.groups:
            run = slice(group.start, group.end)
            assert (PAIR_OF_RELATION[batch.relations[run]] == group.pair).all()
            # Chunks of the global order belong to positions of the batch.
            assert by_machine or (position[run] // CHUNK_SIZE == group.chunk).all()
            assert group.start == ends[-1] < group.end
            ends.append(group.end)
        assert ends[-1] == len(batch)
        assert len({(group.pair, group.chunk) for group in batch.groups}) == len(batch.groups)


def test_another_batch_size_and_number_of_trainers_continue_at_the_same_triple() -> None:
    """A stop after 5 batches of 100: the rest of the epoch in batches of 50, on as many machines."""
    tables, order = edge_tables(3), TripleOrder(SETS, SEED, 0.1)
    large, small = trainers_of(tables, 1, order), trainers_of(tables, 2, order, size=50)
    seen = [id_ for index in range(5) for share in triples_of(large, 0, index) for id_ in share]
    for index in range(10, len(small[0][0])):
        seen += sum(triples_of(small, 0, index), [])
    assert len(seen) == len(set(seen)) == order.num_positions


@pytest.mark.parametrize("by_machine", [True, False])
def test_a_machine_without_triples_trains_empty_batches(by_machine: bool) -> None:
    (table,) = edge_tables(1)
    empty = EdgeTable(np.empty(0, np.int64), np.empty((0, 3), np.int64), np.empty(0, np.float32))
    (full,), (nothing,) = trainers_of([table, empty], 1, by_machine=by_machine)
    seen = []
    for index in range(11):
        batch = nothing.batch(0, index)
        assert len(batch) == 0 and batch.groups == ()
        assert batch.global_size == full.batch(0, index).global_size
        seen += full.batch(0, index).triple_ids.tolist()
    assert sorted(seen) == list(range(NUM_TRIPLES))


def test_partitions_are_told_apart() -> None:
    ids = [table.triple_ids for num_parts in (1, 2, 3, 2) for table in edge_tables(num_parts)]
    marks = [edge_batches.partition_mark(part, rows_of_sets(an_order(in_sets=False), part)) for part in ids]
    assert len(set(marks)) == 6 and marks[1:3] == marks[6:]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2])
def test_sets_in_order_and_each_triple_once(share):
    order = TripleOrder(SETS, SEED, share)
    held = [set(order.held_out(number).tolist()) for number in range(3)]
    assert [len(part) for part in held] == [int(np.ceil(len(part.triple_ids) * share)) for part in SETS]
    seen = []
    for epoch in range(3):
        ids = order.triple_ids(np.arange(order.num_positions), epoch)
        seen.append(ids)
        for number, edge_set in enumerate(SETS):
            first, end = order.range_of(number)
            assert set(ids[first:end].tolist()) == set(edge_set.triple_ids) - held[number]
            assert end - first == len(edge_set.triple_ids) - len(held[number])
    assert not np.array_equal(seen[0], seen[1])
    # Any window is the same part of the order.
    assert np.array_equal(order.triple_ids(np.array([450, 3, 7]), 1), seen[1][[450, 3, 7]])


def test_the_same_triples_are_held_out_wherever_a_set_stands():
    a, b = EdgeSet("a", range(101)), EdgeSet("b", range(101, 200))
    first, second, other_seed = (
        TripleOrder(sets, seed, 0.3) for sets, seed in (([a, b], SEED), ([b, a], SEED), ([a, b], SEED + 1))
    )
    held = first.held_out(0).tolist()
    assert set(held) == set(second.held_out(1).tolist()) != set(other_seed.held_out(0).tolist())
    chunks = [first.held_out(0, chunk, 4).tolist() for chunk in range(4)]
    assert sum(chunks, []) == held and {len(chunk) for chunk in chunks} <= {7, 8}


@pytest.mark.parametrize(("batch_size", "num_chunks"), [(1, 3), (7, 10), (64, 1), (64, 10), (1000, 3)])
def test_passes_tile_the_epoch(batch_size, num_chunks):
    ranges = [(0, 200), (200, 200), (200, 205)]
    passes = plan_passes(ranges, num_chunks, batch_size)
    chunks = [(edge_set, chunk) for edge_set in range(3) for chunk in range(num_chunks)]
    assert [(part.edge_set, part.chunk) for part in passes] == chunks
    bounds = [0, *(part.end_batch for part in passes)]
    assert [part.first_batch for part in passes] == bounds[:-1]
    assert bounds == sorted(bounds) and bounds[-1] == -(-205 // batch_size)
    # A pass ends with the batch that has its last triple.
    for part in passes:
        first, end = ranges[part.edge_set]
        position = first + (end - first) * (part.chunk + 1) // num_chunks
        assert (part.end_batch - 1) * batch_size < position <= part.end_batch * batch_size
    assert plan_passes([(0, 101)], 1, 10) == [Pass(0, 0, 0, 11)]
