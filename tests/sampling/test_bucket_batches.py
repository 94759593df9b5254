"""Batches in bucket order: each triple once, ranges as scheduled; the prefetch that follows them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from unittest import mock

import numpy as np
import pytest

from dglkge.config.schema import BUCKET_ORDERS
from dglkge.data.range_walk import walk_pairs
from dglkge.sampling.bucket_batches import BucketBatches
from dglkge.sampling.prefetch import Prefetcher, TripleReader
from tests.sampling.toy_buckets import BATCH_SIZE, NUM_TRIPLES, PAIRS, SEED, toy_buckets, toy_trainers


def order_of(trainers: list[BucketBatches], epoch: int) -> list[list[int]]:
    return [
        [id_ for trainer in trainers for id_ in trainer.batch(epoch, index).triple_ids.tolist()]
        for index in range(len(trainers[0]))
    ]


LAYOUTS = [(1, 1, 1), (1, 3, 4), (2, 1, 3), (3, 2, 4), (2, 2, 9)]


@pytest.mark.parametrize(("order", "layout"), list(zip(BUCKET_ORDERS, LAYOUTS)))
def test_an_epoch_has_each_triple_once_in_proportional_shares(order, layout):
    num_parts, per_machine, num_ranges = layout
    for is_mixed in [False, True]:
        trainers = toy_trainers(*layout, order, is_mixed=is_mixed)
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


LIMIT_SECONDS = 30.0


Notes = list[tuple[str, str, int]]


class ToyPages:
    """Rows whose every range has one piece, of which the address is the range; notes the advice."""

    def __init__(self, name: str, notes: Notes) -> None:
        self.name, self.notes, self.gate = name, notes, threading.Event()
        self.gate.set()

    def __getattr__(self, method: str) -> Callable[[int, int], bool]:
        return partial(self.note, method)

    def note(self, advice: str, address: int, num_bytes: int) -> bool:
        if advice == "read_ahead":
            self.gate.wait(LIMIT_SECONDS)
        self.notes.append((advice, self.name, address))
        return True

    def pieces(self, number: int) -> list[tuple[int, int]]:
        return [(number, 1)]


def pieces_of(notes: Notes, advice: str) -> list[tuple[str, int]]:
    return [(name, number) for noted, name, number in notes if noted == advice]


def test_the_next_bucket_is_read_before_its_first_batch() -> None:
    (trainer,) = toy_trainers(1, 1, 4, batch_size=20)
    notes: Notes = []
    prefetcher = Prefetcher(trainer.walk, {name: [ToyPages(name, notes)] for name in ("person", "place")})
    held: set[tuple[str, int]] = set()
    num_read = num_pushed = 0
    try:
        for epoch in (0, 1):
            for index in range(len(trainer)):
                prefetcher.advance(epoch, index)
                assert prefetcher.settle(LIMIT_SECONDS)
                read, going = pieces_of(notes, "read_ahead"), pieces_of(notes, "push_out")
                for advice in ("unmap", "start_to_write", "drop"):
                    assert pieces_of(notes, advice) == going
                # What is read is mapped behind that, in the same order.
                assert pieces_of(notes, "map_ahead") == read
                for piece in read:
                    assert notes.index(("read_ahead", *piece)) < notes.index(("map_ahead", *piece))
                # Nothing is read twice, or pushed out that is not there.
                assert len({*read, *going}) == len(read) + len(going)
                assert not held & set(read) and held >= set(going)
                held = held - set(going) | set(read)
                num_pushed += len(going)
                num_read += len(read)
                notes.clear()
                target = trainer.walk.ranges_at(epoch, index) | trainer.walk.ranges_after(epoch, index)
                assert held == target
                here = trainer.walk.pieces(epoch, *trainer.walk.window(index))
                if index + 1 < len(trainer) and len(here) == 1:
                    first = trainer.walk.pieces(epoch, *trainer.walk.window(index + 1))[0]
                    assert {number for _, number in held} >= set(first.ranges)
    finally:
        prefetcher.close()
    assert num_read > num_pushed > 4


def test_a_range_leaves_before_another_is_read() -> None:
    (trainer,) = toy_trainers(1, 1, 4, batch_size=20)
    notes: Notes = []
    names = ("person", "place")
    there = {(name, number) for name in names for number in range(4)}
    prefetcher = Prefetcher(trainer.walk, {name: [ToyPages(name, notes)] for name in names}, there)
    try:
        prefetcher.advance(0, 0)
        assert prefetcher.settle(LIMIT_SECONDS)
    finally:
        prefetcher.close()
    target = trainer.walk.ranges_at(0, 0) | trainer.walk.ranges_after(0, 0)
    going = sorted(there - target)
    assert set(pieces_of(notes, "read_ahead")) == target and len(going) > 2
    # All are unmapped at once, so that the process that writes them can drop them; each write starts before
    # it is waited for; pieces leave and come in turn; and what others unmapped late is dropped at the end.
    assert notes[: len(going)] == [("unmap", *range_) for range_ in going]
    for range_ in going:
        assert notes.index(("start_to_write", *range_)) < notes.index(("push_out", *range_))
    in_turn = [advice for advice, *_ in notes if advice in ("push_out", "read_ahead")]
    assert in_turn[:4] == ["push_out", "read_ahead"] * 2
    assert notes[-len(going) :] == [("drop", *range_) for range_ in going]


def test_closing_does_not_wait_for_all_ranges() -> None:
    (trainer,) = toy_trainers(1, 1, 4)
    notes: Notes = []
    pages = ToyPages("person", notes)
    pages.gate.clear()
    prefetcher = Prefetcher(trainer.walk, {"person": [pages]})
    prefetcher.advance(0, 0)
    assert not prefetcher.settle(0.01)
    closing = threading.Thread(target=prefetcher.close)
    closing.start()
    pages.gate.set()
    closing.join(LIMIT_SECONDS)
    assert not closing.is_alive() and len(notes) <= 1


def toy_file() -> mock.Mock:
    file = mock.Mock()
    file.pieces_between = lambda first, stop: [(first, stop)] if first < stop else []
    return file


def rows_of(advice: mock.Mock) -> list[tuple[int, int]]:
    return [call.args for call in advice.call_args_list]


@pytest.mark.parametrize(("batch_size", "is_mixed"), [(7, True), (20, False), (200, True)])
def test_the_triples_of_a_bucket_are_read_once_and_dropped_behind_its_last_batch(batch_size, is_mixed):
    (trainer,) = toy_trainers(1, 1, 4, batch_size=batch_size, is_mixed=is_mixed)
    file, other = files = [toy_file(), toy_file()]
    reader = TripleReader(trainer, files)
    seen: set[tuple[int, int]] = set()
    again = {trainer.rows_of(segment) for segment in trainer.segments_after(0, len(trainer) - 1)}
    for index in range(len(trainer)):
        reader.advance(0, index)
        now = {trainer.rows_of(segment) for segment in trainer.segments_at(0, index)}
        following = {trainer.rows_of(segment) for segment in trainer.segments_after(0, index)}
        read, dropped = rows_of(file.read_ahead), rows_of(file.drop)
        assert now | following <= set(read)
        seen |= now
        # None that the batch still needs, and none twice.
        assert not now & set(dropped)
        assert len(set(dropped)) == len(dropped)
        # Those of the next epoch's first bucket come again with the last bucket.
        once = [rows for rows in read if rows not in again]
        assert len(set(once)) == len(once)
    assert sum(stop - first for first, stop in seen) == len(trainer.triple_tables[0])
    # The next epoch drops what the last batch has left.
    reader.advance(1, 0)
    segments = trainer.segments_at(1, 0) | trainer.segments_after(1, 0)
    needed = {trainer.rows_of(segment) for segment in segments}
    assert seen - needed <= set(rows_of(file.drop)) <= seen
    for advice in ("read_ahead", "drop"):
        assert rows_of(getattr(file, advice)) == rows_of(getattr(other, advice))
