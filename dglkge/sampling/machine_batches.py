"""Batches with an order of its own for each machine: the cost of a trainer does not grow with the machines.

A global batch takes a proportional share of every machine's triples, in a keyed permutation of the machine.
So a trainer computes the order of its own triples only, and looks none of them up. Chunks of positives lie
within a machine: it meets the negatives of its own chunks, not those of the whole batch. The result depends
on how the graph is partitioned, and not on the number of trainers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dglkge.data.partition_layout import EdgeTable, Rows
from dglkge.kernels.hashing import combine
from dglkge.sampling import triple_order
from dglkge.sampling.edge_batches import EdgeBatch, EdgeBatches, EdgeOptions, ignore_phase
from dglkge.sampling.triple_order import TripleOrder

Ids = npt.NDArray[np.int64]

# Domain separation: the orders of the machines and of the whole graph share the seed, not the key.
_MACHINE_KEY = 0x3AC41E

CHUNK_SLACK = 8
"""A chunk has up to a part of 1 / CHUNK_SLACK more positives than configured."""

ROWS_A_BLOCK = 1 << 20
"""Triples of which the held-out ones are found at a time."""

SAMPLED_IDS = 1 << 16
"""Triples of a partition by which it is recognized."""


class MachineShares:
    """Shares of the machines in each global batch: a pure function of their numbers of triples.

    Of an edge set with N triples a machine has n. When d of the N count as done, it has trained
    floor(n * d / N) of its own: its share of every batch is proportional, and progress stays one integer. A
    batch has less than one triple for each machine and set more or less than its size.

    Parameters
    ----------
    counts : (num_parts, num_sets) int64
        Trained triples of each machine in each edge set.

    Examples
    --------
    >>> shares = MachineShares(np.array([[6, 2], [3, 0]]), 4)
    >>> [shares.windows(batch) for batch in (0, 2)]
    [[(0, [(0, 2), (0, 1)])], [(0, [(5, 6), (2, 3)]), (1, [(0, 2), (0, 0)])]]
    >>> [shares.sizes(batch) for batch in range(3)]
    [[2, 1], [3, 1], [3, 1]]
    """

    def __init__(self, counts: Ids, batch_size: int) -> None:
        # Python's integers: a product of two numbers of triples may exceed 64 bits.
        self._counts: list[list[int]] = counts.tolist()
        self._bounds: list[int] = [0, *np.cumsum(counts.sum(axis=0)).tolist()]
        self._batch_size = batch_size

    @property
    def num_batches(self) -> int:
        """Global batches of an epoch."""
        return -(-self._bounds[-1] // self._batch_size)

    def windows(self, batch: int) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return the positions of a global batch in the orders of the machines.

        For each edge set that the batch has triples of: its number and, by machine, the first position in the
        machine's order of the set, and the one behind the last.
        """
        start, end = (min(turn * self._batch_size, self._bounds[-1]) for turn in (batch, batch + 1))
        found = []
        for number, (first, behind) in enumerate(zip(self._bounds, self._bounds[1:])):
            low, high = max(start, first) - first, min(end, behind) - first
            if low < high:
                size = behind - first
                windows = [(own[number] * low // size, own[number] * high // size) for own in self._counts]
                found.append((number, windows))
        return found

    def sizes(self, batch: int) -> list[int]:
        """Return the number of triples of each machine in a global batch."""
        sizes = [0] * len(self._counts)
        for _, windows in self.windows(batch):
            for machine, (first, end) in enumerate(windows):
                sizes[machine] += end - first
        return sizes


def num_chunks(num_triples: int, chunk_size: int) -> int:
    """Return the number of chunks of a machine's share of a batch; they are of nearly equal size.

    A share is rarely a multiple of the chunk size. An eighth more is allowed, so that one triple too many
    does not make a chunk more, with as many negatives as a full one.

    Examples
    --------
    >>> [num_chunks(size, 1000) for size in (0, 3, 1003, 1126, 2251)]
    [0, 1, 1, 2, 3]
    """
    return -(-num_triples * CHUNK_SLACK // (chunk_size * (CHUNK_SLACK + 1)))


def rows_of_sets(order: TripleOrder, triple_ids: Ids) -> list[Rows]:
    """Return which rows of a partition are trained, by edge set.

    It takes no memory for sets that are ranges of triples with none held out, and 4 bytes a triple for
    others. ``triple_ids`` (m,) are the partition's, ascending.
    """
    dtype = np.int32 if len(triple_ids) < 1 << 31 else np.int64
    found: list[Rows] = []
    for number, one in enumerate(order.sets):
        ids, holds_out = one.triple_ids, order.num_held_out(number) > 0
        first, end = 0, 0
        if len(ids):
            first, end = np.searchsorted(triple_ids, [ids[0], ids[-1] + 1]).tolist()
        if isinstance(ids, range) and not holds_out:
            found.append(range(first, end))
            continue
        blocks = [np.empty(0, dtype)]
        for start in range(first, end, ROWS_A_BLOCK):
            own = triple_ids[start : min(start + ROWS_A_BLOCK, end)]
            places = own - ids.start if isinstance(ids, range) else np.searchsorted(ids, own)
            # Between the first and the last of a scattered set are triples of others.
            kept = np.ones(len(own), bool) if isinstance(ids, range) else ids[places] == own
            if holds_out:
                kept[kept] = order.is_trained(number, places[kept])
            blocks.append((start + np.flatnonzero(kept)).astype(dtype))
        found.append(np.concatenate(blocks))
    return found


def partition_mark(triple_ids: Ids, rows: Sequence[Rows]) -> int:
    """Return a checksum of a partition's triples, from some of them and from the numbers of all.

    It is equal where the machine's order is, and other partitions have another one.
    """
    step = max(1, len(triple_ids) // SAMPLED_IDS)
    numbers = [len(triple_ids), *map(len, rows)]
    return zlib.crc32(np.append(triple_ids[::step], numbers).astype("<i8").tobytes())


class MachineBatches(EdgeBatches):
    """Selects this trainer's triples of each global batch, in its machine's own order.

    Chunks are numbered over all machines, in their order, so that no two of a batch have the same negatives.

    Parameters
    ----------
    rows : sequence of Rows
        Those of the partition that are trained, by edge set: :func:`rows_of_sets`.
    counts : (num_parts, num_sets) int64
        Their numbers on each machine.
    part : int
        The partition of this machine.
    """

    _searches_triples = False  # a position's triple is a row of the partition already

    def __init__(
        self,
        edges: EdgeTable,
        rows: Sequence[Rows],
        counts: Ids,
        part: int,
        order_mark: int,
        options: EdgeOptions,
    ) -> None:
        super().__init__(edges, options)
        self.order_mark, self._rows, self._part = order_mark, rows, part
        self._shares = MachineShares(counts, self._options.batch_size)

    def batch(self, epoch: int, index: int, enter: Callable[[str], None] = ignore_phase) -> EdgeBatch:
        enter("order")
        sizes = self._shares.sizes(index)
        own = sizes[self._part]
        share = self._share(own)
        rows, passed = [np.empty(0, np.int64)], 0
        for number, windows in self._shares.windows(index):
            start, end = windows[self._part]
            # The trainer's part of the machine's triples of this set.
            first, stop = max(share.start - passed, 0), min(share.stop - passed, end - start)
            if first < stop:
                rows.append(self._rows_at(number, epoch, start + first, start + stop))
            passed += end - start
        found = np.concatenate(rows)
        # All trainers of a machine cut its share alike, so those of a chunk draw the same negatives.
        before = sum(num_chunks(size, self._options.chunk_size) for size in sizes[: self._part])
        places = np.arange(share.start, share.stop)
        chunks = before + places * num_chunks(own, self._options.chunk_size) // max(1, own)
        return self._gather(epoch, index, sum(sizes), found, self._triple_ids[found], chunks, enter)

    def _rows_at(self, number: int, epoch: int, start: int, end: int) -> Ids:
        """Return the rows at the positions [start, end) of the machine's order of an edge set."""
        rows = self._rows[number]
        key = combine(_MACHINE_KEY, self._options.seed, number, self._part)
        positions = np.arange(start, end, dtype=np.int64)
        places = triple_order.inverse_permute(positions, len(rows), key, epoch)
        return places + rows.start if isinstance(rows, range) else rows[places].astype(np.int64)
