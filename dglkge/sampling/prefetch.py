"""Reads ranges and triples of the next bucket ahead, and pushes out or drops what is not needed soon.

Batches tell the number of each batch; all other work is in a thread, which only advises the kernel.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from dglkge.sampling.bucket_batches import BucketBatches, BucketOrder, Segment

logger = logging.getLogger(__name__)

Range = tuple[str, int]
Pages = Any
"""Rows in mapped pages, in ranges or not: :class:`dglkge.embeddings.mapped_rows.MappedRows`."""
Piece = tuple[Pages, int, int]

PIECES_AHEAD = 4
"""Pieces that the disk writes, or reads, at a time: more would make the others wait in its queue."""

STOP_SECONDS = 10.0
"""Time that :meth:`Prefetcher.close` waits for the call that runs."""


@dataclass
class Prefetcher:
    """Follows the batches of a machine. Ranges are read once and pushed out once for each visit.

    Attributes
    ----------
    tables : mapping of str to sequence of Pages
        Rows and optimizer state of each entity type.
    there : set of Range
        Ranges that may be in memory already, whole or in part: those that the first batches do not need are
        pushed out.
    """

    schedule: BucketOrder
    tables: Mapping[str, Sequence[Pages]]
    there: AbstractSet[Range] = frozenset()

    def __post_init__(self) -> None:
        # What the thread shall have in memory: ranges of the batch and of the bucket after it.
        self._target: frozenset[Range] = frozenset()
        self._held: frozenset[Range] = frozenset()
        self._there, self._is_closed = frozenset(self.there), False
        self._changed = threading.Condition()
        # A daemon: a call that hangs on a broken disk must not keep a trainer from exiting.
        self._thread = threading.Thread(target=self._work, name="dglkge-prefetch", daemon=True)
        self._thread.start()

    def advance(self, epoch: int, batch: int) -> None:
        """Note the batch that is trained next; returns at once."""
        target = self.schedule.ranges_at(epoch, batch) | self.schedule.ranges_after(epoch, batch)
        with self._changed:
            self._target = target
            self._changed.notify_all()

    def settle(self, timeout_seconds: float) -> bool:
        """Wait until all ranges that were announced are handled; returns False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held == self._target, timeout_seconds)

    def close(self) -> None:
        """Stop the thread; a call to the kernel that runs is waited for, up to a limit."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning("the thread that reads ahead still waits for the disk after %g s", STOP_SECONDS)

    def _work(self) -> None:
        """Handle one set of ranges after another, the newest first."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._held != self._target)
                if self._is_closed:
                    return
                target, held = self._target, self._held
            gone, self._there = (held | self._there) - target, frozenset()
            coming, going = (
                [*chain.from_iterable(map(self._pieces, sorted(ranges)))] for ranges in (target - held, gone)
            )
            # At once: the process that writes them, which takes longer, can then drop each as it is written.
            self._advise(going, "unmap")
            self._advise(going[:PIECES_AHEAD], "start_to_write")
            # Waiting for a piece, dropping it and reading another in turn keeps as many ranges in memory as
            # before. The disk writes the pieces behind it meanwhile.
            reading: deque[Piece] = deque()
            for place, (leaving, entering) in enumerate(zip_longest(going, coming)):
                self._advise(going[place + PIECES_AHEAD : place + PIECES_AHEAD + 1], "start_to_write")
                if leaving is not None:
                    self._advise([leaving], "push_out")
                if entering is not None:
                    self._advise([entering], "read_ahead")
                    reading.append(entering)
                if len(reading) > PIECES_AHEAD:
                    self._advise([reading.popleft()], "map_ahead")
            self._advise(reading, "map_ahead")
            # Once more: other processes may have unmapped some of it only now.
            self._advise(going, "drop")
            with self._changed:
                self._held = target
                self._changed.notify_all()

    def _pieces(self, range_: Range) -> Iterator[Piece]:
        """Yield the pieces of a range of all tensors of a table."""
        name, number = range_
        for pages in self.tables.get(name, ()):
            for address, num_bytes in pages.pieces(number):
                yield pages, address, num_bytes

    def _advise(self, pieces: Iterable[Piece], advice: str) -> None:
        """Advise the kernel about pieces; returns early if closed meanwhile."""
        for pages, address, num_bytes in pieces:
            # Read without the lock: a late view only costs one more call.
            if self._is_closed:
                return
            getattr(pages, advice)(address, num_bytes)


class TripleReader:
    """Reads the triples of the next bucket ahead, and drops those of a bucket once it was trained.

    They are read once an epoch. Otherwise they fill the page cache, and the kernel, looking for memory,
    writes rows that are still trained.
    """

    def __init__(self, schedule: BucketBatches, files: Sequence[Pages]) -> None:
        self._schedule, self._files = schedule, files
        self._there: AbstractSet[Segment] = frozenset()

    def advance(self, epoch: int, batch: int) -> None:
        """Drop what neither this batch nor the next bucket needs, and read what is new."""
        segments = self._schedule.segments_at(epoch, batch) | self._schedule.segments_after(epoch, batch)
        for file, address, num_bytes in chain.from_iterable(map(self._pieces, self._there - segments)):
            file.drop(address, num_bytes)
        for file, address, num_bytes in chain.from_iterable(map(self._pieces, segments - self._there)):
            file.read_ahead(address, num_bytes)
        self._there = segments

    def _pieces(self, segment: Segment) -> Iterator[Piece]:
        for file in self._files:
            for address, num_bytes in file.pieces_between(*self._schedule.rows_of(segment)):
                yield file, address, num_bytes
