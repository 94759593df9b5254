"""Reads the ranges of the next bucket ahead, and pushes out those that are not needed soon.

Batches tell the number of each batch; all other work is in a thread, which only advises the kernel.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

logger = logging.getLogger(__name__)

Range = tuple[str, int]

STOP_SECONDS = 10.0
"""Time that :meth:`Prefetcher.close` waits for the call that runs."""


class RangeSchedule(Protocol):
    """The ranges that batches need: a pure function; :class:`.bucket_batches.BucketOrder` is one."""

    def ranges_at(self, epoch: int, batch: int) -> AbstractSet[Range]:
        """Return the ranges (entity type, range) of a batch."""
        ...

    def ranges_after(self, epoch: int, batch: int) -> AbstractSet[Range]:
        """Return the ranges of the first bucket that begins behind a batch."""
        ...


class Pages(Protocol):
    """A table's rows in ranges; :class:`dglkge.embeddings.mapped_rows.MappedRows` is one."""

    def pieces(self, number: int) -> Sequence[tuple[int, int]]:
        """Return the address and length in bytes of each piece of a range."""
        ...

    def read_ahead(self, address: int, num_bytes: int) -> bool:
        """Start to read a piece."""
        ...

    def push_out(self, address: int, num_bytes: int) -> bool:
        """Write a piece back, and let the kernel take its memory."""
        ...


class Prefetcher:
    """Follows the batches of a machine. Ranges are read once and pushed out once for each visit.

    Parameters
    ----------
    schedule : RangeSchedule
    tables : mapping of str to sequence of Pages
        Rows and optimizer state of each entity type.

    Attributes
    ----------
    num_read, num_pushed_out : int
        Ranges so far.
    """

    def __init__(self, schedule: RangeSchedule, tables: Mapping[str, Sequence[Pages]]) -> None:
        self._schedule = schedule
        self._tables = tables
        self.num_read = self.num_pushed_out = 0
        # What the thread shall have in memory: ranges of the batch and of the bucket after it.
        self._wanted: frozenset[Range] = frozenset()
        self._held: frozenset[Range] = frozenset()
        self._is_closed = False
        self._changed = threading.Condition()
        # A daemon: a call that hangs on a broken disk must not keep a trainer from exiting.
        self._thread = threading.Thread(target=self._work, name="dglkge-prefetch", daemon=True)
        self._thread.start()

    def advance(self, epoch: int, batch: int) -> None:
        """Note the batch that is trained next; returns at once."""
        now = self._schedule.ranges_at(epoch, batch)
        wanted = frozenset(now) | self._schedule.ranges_after(epoch, batch)
        with self._changed:
            if wanted != self._wanted:
                self._wanted = wanted
                self._changed.notify_all()

    def settle(self, timeout_seconds: float) -> bool:
        """Wait until all ranges that were announced are handled; returns False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held == self._wanted, timeout_seconds)

    def close(self) -> None:
        """Stop the thread; a call to the kernel that runs is waited for, up to a limit."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning(
                "the thread that reads ranges ahead still waits for the disk after %g s", STOP_SECONDS
            )

    def _work(self) -> None:
        """Handle one set of ranges after another, the newest first."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._held != self._wanted)
                if self._is_closed:
                    return
                wanted, held = self._wanted, self._held
            # Reading first: training waits for what comes, and for nothing that goes.
            for one in sorted(wanted - held):
                self.num_read += self._advise(one, "read_ahead")
            for one in sorted(held - wanted):
                self.num_pushed_out += self._advise(one, "push_out")
            with self._changed:
                self._held = wanted
                self._changed.notify_all()

    def _advise(self, one: Range, what: str) -> bool:
        """Advise the kernel about a range of all tensors of a table; returns False if closed meanwhile."""
        name, number = one
        for pages in self._tables.get(name, ()):
            for address, num_bytes in pages.pieces(number):
                # Read without the lock: a late view only costs one more call.
                if self._is_closed:
                    return False
                getattr(pages, what)(address, num_bytes)
        return True
