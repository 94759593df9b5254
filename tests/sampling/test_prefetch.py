"""The prefetch follows the batches: what comes is read once before, what goes is pushed out once after."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dglkge.sampling.prefetch import Prefetcher, TripleReader
from tests.sampling.toy_buckets import toy_trainers

LIMIT_SECONDS = 30.0


class ToyPages:
    """Rows whose every range has one piece, of which the address is the range; notes the advice."""

    def __init__(self, name: str, notes: list[tuple[str, str, int]]) -> None:
        self.gate: threading.Event | None = None

        def noting(advice: str) -> Callable[[int, int], bool]:
            def note(address: int, num_bytes: int) -> bool:
                if advice == "read" and self.gate is not None:
                    self.gate.wait(LIMIT_SECONDS)
                notes.append((advice, name, address))
                return True

            return note

        self.read_ahead, self.map_ahead, self.unmap = noting("read"), noting("map"), noting("unmap")
        self.start_to_write, self.push_out, self.drop = noting("write"), noting("push"), noting("drop")

    def pieces(self, number: int) -> list[tuple[int, int]]:
        return [(number, 1)]


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
                going = [note[1:] for note in notes if note[0] == "push"]
                for advice in ("unmap", "write", "drop"):
                    assert [note[1:] for note in notes if note[0] == advice] == going
                # What is read is mapped behind that, in the same order.
                assert [note[1:] for note in notes if note[0] == "map"] == [
                    note[1:] for note in notes if note[0] == "read"
                ]
                for advice, name, number in notes:
                    assert advice != "map" or notes.index(("read", name, number)) < notes.index(
                        ("map", name, number)
                    )
                    if advice not in ("push", "read"):
                        continue
                    # Nothing is read twice, or pushed out that is not there.
                    assert ((name, number) in held) == (advice == "push")
                    held ^= {(name, number)}
                num_pushed += len(going)
                num_read += sum(note[0] == "read" for note in notes)
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
    assert {note[1:] for note in notes if note[0] == "read"} == target and len(going) > 2
    # All are unmapped at once, so that the process that writes them can drop them.
    assert notes[: len(going)] == [("unmap", *range_) for range_ in going]
    # Each write starts before it is waited for; pieces leave and come in turn; and what others unmapped late
    # is dropped at the end.
    for range_ in going:
        assert notes.index(("write", *range_)) < notes.index(("push", *range_))
    assert [note[0] for note in notes if note[0] in ("push", "read")][:4] == ["push", "read"] * 2
    assert notes[-len(going) :] == [("drop", *range_) for range_ in going]


def test_closing_does_not_wait_for_all_ranges() -> None:
    (trainer,) = toy_trainers(1, 1, 4)
    notes: list[tuple[str, str, int]] = []
    pages = ToyPages("person", notes)
    pages.gate = threading.Event()
    prefetcher = Prefetcher(trainer.walk, {"person": [pages]})
    prefetcher.advance(0, 0)
    assert not prefetcher.settle(0.01)
    closing = threading.Thread(target=prefetcher.close)
    closing.start()
    pages.gate.set()
    closing.join(LIMIT_SECONDS)
    assert not closing.is_alive() and len(notes) <= 1


class ToyTriples:
    """Rows of a mapped file; notes the rows that are read ahead and dropped."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []
        self.dropped: list[tuple[int, int]] = []

    def pieces_between(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the rows as one piece, if there are any."""
        return [(first, stop)] if first < stop else []

    def read_ahead(self, *rows: int) -> bool:
        self.read.append(rows)  # type: ignore[arg-type]
        return True

    def drop(self, *rows: int) -> bool:
        self.dropped.append(rows)  # type: ignore[arg-type]
        return True


@pytest.mark.parametrize(("batch_size", "is_mixed"), [(7, True), (20, False), (200, True)])
def test_the_triples_of_a_bucket_are_read_once_and_dropped_behind_its_last_batch(batch_size, is_mixed):
    (trainer,) = toy_trainers(1, 1, 4, batch_size=batch_size, is_mixed=is_mixed)
    files = [ToyTriples(), ToyTriples()]
    reader = TripleReader(trainer, files)
    seen: set[tuple[int, int]] = set()
    again = {trainer.rows_of(segment) for segment in trainer.segments_after(0, len(trainer) - 1)}
    for index in range(len(trainer)):
        reader.advance(0, index)
        now = {trainer.rows_of(segment) for segment in trainer.segments_at(0, index)}
        following = {trainer.rows_of(segment) for segment in trainer.segments_after(0, index)}
        assert now | following <= set(files[0].read)
        seen |= now
        # None that the batch still needs, and none twice.
        assert not now & set(files[0].dropped)
        assert len(set(files[0].dropped)) == len(files[0].dropped)
        # Those of the next epoch's first bucket come again with the last bucket.
        once = [rows for rows in files[0].read if rows not in again]
        assert len(set(once)) == len(once)
    assert sum(stop - first for first, stop in seen) == len(trainer.triple_tables[0])
    # The next epoch drops what the last batch has left.
    reader.advance(1, 0)
    needed = {
        trainer.rows_of(segment) for segment in trainer.segments_at(1, 0) | trainer.segments_after(1, 0)
    }
    assert seen - needed <= set(files[0].dropped) <= seen
    assert (files[0].read, files[0].dropped) == (files[1].read, files[1].dropped)
