"""Batches in bucket order: each triple once, the same for any number of trainers, ranges as scheduled."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.config.schema import BUCKET_ORDERS
from dglkge.data.range_walk import walk_pairs
from dglkge.sampling.bucket_batches import BucketBatches
from tests.sampling.toy_buckets import BATCH_SIZE, NUM_TRIPLES, PAIRS, SEED, toy_buckets, toy_trainers


def order_of(trainers: list[BucketBatches], epoch: int) -> list[list[int]]:
    return [
        [id_ for trainer in trainers for id_ in trainer.batch(epoch, index).triple_ids.tolist()]
        for index in range(len(trainers[0]))
    ]


LAYOUTS = [(1, 1, 1), (1, 3, 4), (2, 1, 3), (3, 2, 4), (2, 2, 9)]


@pytest.mark.parametrize(
    ("order", "num_parts", "per_machine", "num_ranges"),
    [(order, *layout) for order, layout in zip(BUCKET_ORDERS, LAYOUTS)],
)
def test_an_epoch_has_each_triple_once_in_proportional_shares(order, num_parts, per_machine, num_ranges):
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
            for part, machine in enumerate(toy_buckets(num_parts, num_ranges)):
                of_machine = trainers[part * per_machine : (part + 1) * per_machine]
                share = sum(len(trainer.batch(4, index)) for trainer in of_machine)
                assert abs(share - full * len(machine.table.triple_ids) / NUM_TRIPLES) < 1


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
    triples = zip(machine.table.triple_ids.tolist(), machine.table.edges.tolist())
    ends = {id_: (head % 10, tail % 10) for id_, (head, _, tail) in triples}
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
        pairs = walk_pairs(order, 4, SEED, epoch).tolist()
        walk = [tuple(sorted(pair)) for pair in pairs if pair[0] != pair[1]]
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


def test_directed_and_mixed_buckets_of_one_range_are_the_same() -> None:
    """Epochs are in different orders."""
    directed, other = (toy_trainers(1, 1, 1, is_mixed=is_mixed) for is_mixed in (False, True))
    assert order_of(directed, 3) == order_of(other, 3) != order_of(other, 2)
    triples = sum(order_of(directed, 3), [])
    assert triples != sorted(triples)


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
