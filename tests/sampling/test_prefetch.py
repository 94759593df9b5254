"""The prefetch follows the batches: what comes is read once before, what goes is pushed out once after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest

from dglkge.sampling.prefetch import Prefetcher, TripleReader
from tests.sampling.toy_buckets import toy_trainers

LIMIT_SECONDS = 30.0


class ToyPages:
    """Rows whose every range has one piece, of which the address is the range; notes the advice."""

    def __init__(self, name: str, notes: list[tuple[str, str, int]]) -> None:
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


def pieces_of(notes: list[tuple[str, str, int]], advice: str) -> list[tuple[str, int]]:
    return [(name, number) for noted, name, number in notes if noted == advice]


def test_the_next_bucket_is_read_before_its_first_batch() -> None:
    (trainer,) = toy_trainers(1, 1, 4, batch_size=20)
    notes: list[tuple[str, str, int]] = []
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
    notes: list[tuple[str, str, int]] = []
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
    # All are unmapped at once, so that the process that writes them can drop them.
    assert notes[: len(going)] == [("unmap", *range_) for range_ in going]
    # Each write starts before it is waited for; pieces leave and come in turn; and what others unmapped late
    # is dropped at the end.
    for range_ in going:
        assert notes.index(("start_to_write", *range_)) < notes.index(("push_out", *range_))
    in_turn = [advice for advice, *_ in notes if advice in ("push_out", "read_ahead")]
    assert in_turn[:4] == ["push_out", "read_ahead"] * 2
    assert notes[-len(going) :] == [("drop", *range_) for range_ in going]


def test_closing_does_not_wait_for_all_ranges() -> None:
    (trainer,) = toy_trainers(1, 1, 4)
    notes: list[tuple[str, str, int]] = []
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
