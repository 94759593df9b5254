"""Batches in bucket order: each triple once, the same for any number of trainers, ranges as scheduled."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.config.schema import BUCKET_ORDERS
from dglkge.data.range_walk import walk_pairs
from dglkge.sampling.bucket_batches import BucketBatches
from tests.sampling.toy_buckets import (
    BATCH_SIZE,
    CHUNK_SIZE,
    NUM_TRIPLES,
    PAIRS,
    SEED,
    toy_buckets,
    toy_trainers,
)


def order_of(trainers: list[BucketBatches], epoch: int) -> list[list[int]]:
    """Return the triples of each global batch, trainer after trainer."""
    return [
        [id_ for trainer in trainers for id_ in trainer.batch(epoch, index).triple_ids.tolist()]
        for index in range(len(trainers[0]))
    ]


LAYOUTS = [(1, 1, 1), (1, 3, 4), (2, 1, 3), (3, 2, 4), (2, 2, 9)]


@pytest.mark.parametrize(
    ("order", "num_parts", "per_machine", "num_ranges"),
    [(order, *layout) for order, layout in zip(BUCKET_ORDERS, LAYOUTS)],
)
def test_an_epoch_has_the_triples_of_one_range_each_once(order, num_parts, per_machine, num_ranges):
    for is_mixed in [False, True]:
        trainers = toy_trainers(num_parts, per_machine, num_ranges, order, is_mixed=is_mixed)
        assert len(trainers[0]) == 11
        batches = order_of(trainers, epoch=4)
        assert sorted(id_ for batch in batches for id_ in batch) == list(range(NUM_TRIPLES))
        for index, batch in enumerate(batches):
            assert {trainer.batch(4, index).global_size for trainer in trainers} == {len(batch)}
            # Shares are rounded down for each machine.
            full = min(BATCH_SIZE, NUM_TRIPLES - index * BATCH_SIZE)
            assert abs(len(batch) - full) < num_parts


def test_shares_of_machines_stay_proportional() -> None:
    sizes = [len(machine.table.triple_ids) for machine in toy_buckets(3, 4)]
    for index in range(10):
        shares = [len(trainer.batch(0, index)) for trainer in toy_trainers(3, 1, 4)]
        for share, size in zip(shares, sizes):
            assert abs(share - BATCH_SIZE * size / NUM_TRIPLES) < 1


@pytest.mark.parametrize("num_parts", [1, 2])
def test_one_two_and_three_trainers_have_the_same_batches_and_chunks(num_parts: int) -> None:
    def chunks(per_machine: int) -> list[dict]:
        batches = []
        for index in range(11):
            groups: dict = {}
            for rank, trainer in enumerate(toy_trainers(num_parts, per_machine, 4)):
                batch = trainer.batch(2, index)
                for group in batch.groups:
                    key = (rank // per_machine, group.chunk, group.pair, batch.ranges[group.chunk])
                    groups.setdefault(key, set()).update(batch.triple_ids[group.start : group.end].tolist())
            batches.append(groups)
        return batches

    alone = chunks(1)
    assert chunks(2) == alone and chunks(3) == alone
    for groups in alone:
        by_chunk: dict = {}
        for (machine, chunk, _, _), ids in groups.items():
            by_chunk[machine, chunk] = by_chunk.get((machine, chunk), 0) + len(ids)
        assert max(by_chunk.values()) <= CHUNK_SIZE


@pytest.mark.parametrize("order", ["inside_out", "random"])
def test_triples_follow_the_walk_and_rows_belong_to_them(order: str) -> None:
    (trainer,) = toy_trainers(1, 1, 4, order)
    seen: list[tuple[int, int]] = []
    for index in range(len(trainer)):
        batch = trainer.batch(1, index)
        assert (batch.heads // 10 == batch.triple_ids).all() and (batch.tails // 10 == batch.triple_ids).all()
        assert batch.weights is not None and np.allclose(batch.weights, batch.triple_ids / 7)
        needed = set()
        for group in batch.groups:
            run = slice(group.start, group.end)
            ranges = batch.ranges[group.chunk]
            # The last digit of a node is its range.
            assert set(batch.heads[run] % 10) == {ranges[0]} and set(batch.tails[run] % 10) == {ranges[1]}
            assert (batch.relations[run] == group.pair).all()
            needed |= {(PAIRS[group.pair][0], ranges[0]), (PAIRS[group.pair][1], ranges[1])}
            if not seen or seen[-1] != ranges:
                seen.append(ranges)
        assert needed <= trainer.walk.ranges_at(1, index)
        assert {number for _, number in trainer.walk.ranges_at(1, index)} == {
            number for ranges in batch.ranges for number in ranges
        }
        assert trainer.place(1, index + 1)["bucket"] == list(batch.ranges[-1])
    counts = toy_buckets(1, 4)[0].counts[0].sum(axis=0)
    walk = [tuple(pair) for pair in walk_pairs(order, 4, SEED, 1).tolist() if counts[tuple(pair)]]
    assert seen == walk


@pytest.mark.parametrize("order", ["inside_out", "hilbert"])
def test_a_mixed_bucket_has_all_triples_between_two_ranges(order: str) -> None:
    """And of those inside a range each partner has an equal share, in every epoch another one."""
    (trainer,) = toy_trainers(1, 1, 4, order, is_mixed=True)
    (machine,) = toy_buckets(1, 4)
    ends = {id_: (id_head % 10, id_tail % 10) for id_, (id_head, _, id_tail) in zip(
        machine.table.triple_ids.tolist(), machine.table.edges.tolist()
    )}  # fmt: skip
    partners_of: dict[int, list[tuple[int, int]]] = {}
    for epoch in range(3):
        seen: dict[tuple[int, int], list[int]] = {}
        for index in range(len(trainer)):
            batch = trainer.batch(epoch, index)
            for group in batch.groups:
                ranges, run = batch.ranges[group.chunk], slice(group.start, group.end)
                seen.setdefault(ranges, []).extend(batch.triple_ids[run].tolist())
                needed = {(name, number) for name in PAIRS[group.pair] for number in ranges}
                assert needed <= trainer.walk.ranges_at(epoch, index)
        walk = [
            tuple(sorted(pair)) for pair in walk_pairs(order, 4, SEED, epoch).tolist() if pair[0] != pair[1]
        ]
        assert list(seen) == [pair for pair in dict.fromkeys(walk) if pair in seen]
        assert trainer.walk.num_buckets == 6 and len(set(walk)) == 6
        for ranges, ids in seen.items():
            assert set(ids) >= {id_ for id_, pair in ends.items() if set(pair) == set(ranges)}
            assert all(set(ends[id_]) <= set(ranges) for id_ in ids)
            for inner in ranges:
                inside = [id_ for id_ in ids if ends[id_] == (inner, inner)]
                everywhere = sum(pair == (inner, inner) for pair in ends.values())
                assert abs(len(inside) - everywhere / 3) < 1
                for id_ in inside:
                    partners_of.setdefault(id_, []).append(ranges)
    assert all(len(set(partners)) == 3 for partners in partners_of.values())


@pytest.mark.parametrize(
    ("num_parts", "per_machine", "is_mixed"), [(1, 2, True), (3, 1, False), (3, 1, True)]
)
def test_edge_sets_are_walked_in_turn(num_parts: int, per_machine: int, is_mixed: bool) -> None:
    """Each by all of its buckets, with batches that lie in a set but for those between two."""
    trainers = toy_trainers(num_parts, per_machine, 3, is_mixed=is_mixed, num_sets=2)
    bounds = [trainers[0].order.range_of(number) for number in (0, 1)]
    batches = order_of(trainers, epoch=1)
    assert sorted(id_ for batch in batches for id_ in batch) == list(range(NUM_TRIPLES))
    for index, batch in enumerate(batches):
        start, end = index * BATCH_SIZE, (index + 1) * BATCH_SIZE
        expected = {number for number, (low, high) in enumerate(bounds) if start < high and low < end}
        assert {id_ % 2 for id_ in batch} == expected
    for trainer in trainers[::per_machine]:
        walked = [
            (piece.turn, piece.edge_set, piece.ranges)
            for index in range(len(trainer))
            for piece in trainer.walk.pieces(1, *trainer.walk.window(index))
        ]
        first, second = (
            list(dict.fromkeys(ranges for _, edge_set, ranges in walked if edge_set == number))
            for number in (0, 1)
        )
        assert walked == sorted(walked, key=lambda piece: piece[:2])
        # All buckets of these random graphs have triples, in each set.
        assert first == second and 2 * len(first) == trainer.walk.num_buckets


def test_directed_and_mixed_buckets_of_one_range_are_the_same() -> None:
    directed, other = (toy_trainers(1, 1, 1, is_mixed=is_mixed) for is_mixed in (False, True))
    assert order_of(directed, 3) == order_of(other, 3)


@pytest.mark.parametrize("batch_size", [10, 100])
def test_the_schedule_announces_the_next_bucket(batch_size: int) -> None:
    (trainer,) = toy_trainers(1, 1, 4, batch_size=batch_size)
    order, counts = trainer.walk, toy_buckets(1, 4)[0].counts[0]
    # Brute force: the bucket of every position of two epochs.
    buckets = []
    for epoch in (0, 1):
        for head, tail in walk_pairs("inside_out", 4, SEED, epoch).tolist():
            buckets += [(head, tail)] * int(counts[:, head, tail].sum())

    def ranges(bucket: tuple[int, int]) -> set[tuple[str, int]]:
        kinds = [PAIRS[number] for number in range(2) if counts[(number, *bucket)]]
        return {range_ for lhs, rhs in kinds for range_ in ((lhs, bucket[0]), (rhs, bucket[1]))}

    for index in range(len(trainer)):
        start, end = index * batch_size, min((index + 1) * batch_size, NUM_TRIPLES)
        assert order.window(index) == (start, end)
        here = set().union(*(ranges(bucket) for bucket in buckets[start:end]))
        assert order.ranges_at(0, index) == here
        behind = [place for place in range(end, NUM_TRIPLES) if buckets[place] != buckets[end - 1]]
        following = buckets[behind[0] if behind else NUM_TRIPLES]
        in_one = len(set(buckets[start:end])) == 1
        assert order.ranges_after(0, index) == (ranges(following) if in_one else set()), index


def test_epochs_and_buckets_are_in_different_keyed_orders() -> None:
    (trainer,) = toy_trainers(1, 1, 2)
    first, second = (sum(order_of([trainer], epoch), []) for epoch in (0, 1))
    assert first != second and sorted(first) == sorted(second)
    assert first != sorted(first)


@pytest.mark.parametrize(("num_parts", "num_sets"), [(1, 1), (3, 1), (2, 2)])
def test_another_batch_size_continues_at_the_same_triple(num_parts: int, num_sets: int) -> None:
    """Half of an epoch at one size, the rest at another: each triple once; also of two sets."""
    large, small = (toy_trainers(num_parts, 1, 4, batch_size=size, num_sets=num_sets) for size in (100, 50))
    batches = order_of(large, 0)[:6] + order_of(small, 0)[12:]
    assert sorted(sum(batches, [])) == list(range(NUM_TRIPLES))


def test_batches_with_new_buckets_are_told_of_as_they_begin() -> None:
    told, plain = (toy_trainers(2, 1, 4, batch_size=20)[0] for _ in range(2))
    seen: list[tuple[int, int]] = []
    told.when_batch(lambda epoch, index: seen.append((epoch, index)))
    for index in range(len(plain)):
        told.begin(0, index)
    # Told of are batches with other buckets than the batch before, and the first one of the next epoch.
    told.begin(1, 0)
    buckets = [list(dict.fromkeys(plain.batch(0, index).ranges)) for index in range(len(plain))]
    expected = [index for index in range(len(plain)) if not index or buckets[index] != buckets[index - 1]]
    assert seen == [*((0, index) for index in expected), (1, 0)] and 4 < len(expected) < len(plain)
