"""Batches in bucket order: an epoch walks over the pairs of ranges of a machine's rows.

A *directed* bucket (i, j) has the triples with their head in range i and their tail in range j. A *mixed*
one {i, j} has those from i to j, those from j to i, and a share of those inside i and inside j: a (P - 1)th,
another one for each partner. Entities of both ranges are then right and wrong answers of one batch, where in
a directed bucket all tails are of one range and are never compared with those of others.

The order belongs to a machine's triples, not to its trainers. Machine m has n_m of the N triples, and has
trained floor(n_m · d / N) of them when d triples of the whole graph count as done, in the order of its own
walk: its share of every global batch is proportional, and progress stays one integer. Of several edge sets
each is walked in turn, so that N are those of a set. Inside a bucket triples
come in the keyed permutation of :mod:`.triple_order`. All machines follow the same walk, so that rows of the
others are usually in a range that its owner has in memory too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from dglkge.data.edge_buckets import EdgeBuckets
from dglkge.data.range_walk import unordered, walk_pairs
from dglkge.kernels.hashing import combine
from dglkge.sampling import triple_order
from dglkge.sampling.edge_batches import EdgeBatch, EdgeBatches, EdgeOptions, MachineShares, ignore_phase
from dglkge.typing import Ids

_BUCKET_KEY = 0xB0CE7

Bucket = tuple[int, tuple[int, int]]
"""Number of the edge set, and the two ranges."""


@dataclass(frozen=True)
class Segment:
    """Triples of a bucket that lie together, by their places among the machine's triples of a cell.

    A cell is the number of an edge set times P, plus range of the heads, times P, plus range of the tails.
    """

    cell: int
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Piece:
    """Consecutive triples of one bucket in a machine's order, by positions in the bucket's keyed order.

    ``turn`` is the place of the bucket in the walks over all edge sets; ``ranges`` are those of the heads and
    of the tails, of a mixed bucket its two ranges.
    """

    turn: int
    edge_set: int
    ranges: tuple[int, int]
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass
class BucketOrder:
    """The order of a machine's triples over an epoch: a pure function of its counts and of the seed.

    Attributes
    ----------
    counts : (S, K, P, P) int64
        The machine's triples by edge set, edge type, range of the head and range of the tail.
    part : int
        The machine.
    order : str
        One of :data:`dglkge.data.range_walk.WALKS`.
    types : sequence of (str, str)
        Entity types of the heads and tails of each edge type.
    is_mixed : bool

    Examples
    --------
    >>> shares = MachineShares(np.array([[7], [7]]), 4)
    >>> counts = np.array([[[[3, 0], [0, 4]]]])
    >>> order = BucketOrder(counts, 0, shares, "inside_out", 0, [("word", "word")])
    >>> [order.window(batch) for batch in range(4)]
    [(0, 2), (2, 4), (4, 6), (6, 7)]
    >>> sorted(order.ranges_at(0, 0)) in ([("word", 0)], [("word", 1)])
    True
    """

    counts: Ids
    part: int
    shares: MachineShares
    order: str
    seed: int
    types: Sequence[tuple[str, str]]
    is_mixed: bool = False

    def __post_init__(self) -> None:
        self._by_bucket = self.counts.sum(axis=1)
        self._first_of_set = np.append(0, np.cumsum(self.counts.sum(axis=(1, 2, 3)))).tolist()
        self._num_triples = self._first_of_set[-1]
        self.num_ranges = int(self.counts.shape[2])
        # The walk of an epoch, and where each of its buckets ends: two epochs, as the prefetch looks ahead.
        self._walk = lru_cache(maxsize=2)(self._make_walk)
        # Of an epoch, empty ones included.
        self.num_buckets = len(self._walk(0)[0])

    def _make_walk(self, epoch: int) -> tuple[list[Bucket], Ids]:
        """Return set and ranges of each bucket in its turn, and the position behind its last triple."""
        walk = walk_pairs(self.order, self.num_ranges, self.seed, epoch)
        pairs = [(first, second) for first, second in (unordered(walk) if self.is_mixed else walk).tolist()]
        turns = [(edge_set, pair) for edge_set in range(len(self.counts)) for pair in pairs]
        sizes = [sum(map(len, self.segments(epoch, *bucket))) for bucket in turns]
        return turns, np.cumsum(np.array(sizes, np.int64))

    def segments(self, epoch: int, edge_set: int, ranges: tuple[int, int]) -> list[Segment]:
        """Return where the triples of a bucket lie."""
        first, second = ranges
        if not self.is_mixed or self.num_ranges == 1:
            return [self._segment(edge_set, first, second)]
        segments = [self._segment(edge_set, first, second), self._segment(edge_set, second, first)]
        for inner, partner in ((first, second), (second, first)):
            # Its place among the partners of `inner`; it turns from epoch to epoch.
            place = (partner - (partner > inner) + epoch) % (self.num_ranges - 1)
            whole = self._segment(edge_set, inner, inner)
            cuts = (len(whole) * turn // (self.num_ranges - 1) for turn in (place, place + 1))
            segments.append(Segment(whole.cell, *cuts))
        return segments

    def _segment(self, edge_set: int, heads: int, tails: int) -> Segment:
        cell = (edge_set * self.num_ranges + heads) * self.num_ranges + tails
        return Segment(cell, 0, int(self._by_bucket[edge_set, heads, tails]))

    def window(self, batch: int) -> tuple[int, int]:
        """Return the first position of a global batch in the machine's order, and the one behind its last."""
        firsts, windows = self._first_of_set, self.shares.windows(batch)
        positions = [firsts[number] + position for number, parts in windows for position in parts[self.part]]
        return (positions[0], positions[-1]) if positions else (self._num_triples, self._num_triples)

    def pieces(self, epoch: int, start: int, end: int) -> list[Piece]:
        """Return the buckets of the positions [start, end), in their order."""
        turns, ends = self._walk(epoch)
        pieces = []
        turn = int(np.searchsorted(ends, start, side="right"))
        while start < end:
            stop = min(end, int(ends[turn]))
            if stop > start:
                first = int(ends[turn - 1]) if turn else 0
                pieces.append(Piece(turn, *turns[turn], start - first, stop - first))
                start = stop
            turn += 1
        return pieces

    def rows(self, epoch: int, piece: Piece, starts: Ids) -> Ids:
        """Return the rows (n,) of a piece's triples, by the keyed permutation of its bucket.

        ``starts`` (S * P * P + 1,) has the first row of each cell in the tables, and the end of the last.
        """
        segments = self.segments(epoch, piece.edge_set, piece.ranges)
        positions = np.arange(piece.start, piece.end, dtype=np.int64)
        key = combine(_BUCKET_KEY, self.seed, piece.edge_set, *piece.ranges)
        places = triple_order.inverse_permute(positions, sum(map(len, segments)), key, epoch)
        ends = np.cumsum(np.array([len(segment) for segment in segments], np.int64))
        number = np.searchsorted(ends, places, side="right")
        behind = np.array([int(starts[segment.cell]) + segment.end for segment in segments], np.int64)
        return behind[number] - (ends[number] - places)

    def ranges_at(self, epoch: int, batch: int) -> frozenset[tuple[str, int]]:
        """Return the ranges that a global batch reads and trains on this machine: (entity type, range)."""
        return self._ranges_of(epoch, self.pieces(epoch, *self.window(batch)))

    def ranges_after(self, epoch: int, batch: int) -> frozenset[tuple[str, int]]:
        """Return the ranges of the first bucket behind a global batch; after the last, of the next epoch.

        Of a batch in several buckets none: memory holds their ranges then, and one of them goes after it.
        """
        if len(self.pieces(epoch, *self.window(batch))) > 1:
            return frozenset()
        return self._ranges_of(*self.bucket_after(epoch, batch))

    def bucket_after(self, epoch: int, batch: int) -> tuple[int, list[Piece]]:
        """Return the epoch and the first triple of the first bucket that begins behind a global batch."""
        _, end = self.window(batch)
        _, ends = self._walk(epoch)
        following = int(ends[np.searchsorted(ends, end - 1, side="right")]) if end else 0
        if following < self._num_triples:
            return epoch, self.pieces(epoch, following, following + 1)
        return epoch + 1, self.pieces(epoch + 1, 0, min(1, self._num_triples))

    def batches_of(self, epoch: int) -> list[tuple[int, int, int]]:
        """Return turn, first and last global batch of each bucket that has triples on this machine."""
        _, ends = self._walk(epoch)
        batches = range(self.shares.num_batches)

        def batch_of(position: int) -> int:
            return bisect_right(batches, position, key=lambda batch: self.window(batch)[1])

        firsts = np.append(0, ends[:-1])
        turns = np.flatnonzero(ends > firsts).tolist()
        return [(turn, batch_of(int(firsts[turn])), batch_of(int(ends[turn]) - 1)) for turn in turns]

    def bucket(self, epoch: int, turn: int) -> Bucket:
        """Return the edge set and the two ranges of a bucket by its turn."""
        return self._walk(epoch)[0][turn]

    def _ranges_of(self, epoch: int, pieces: Sequence[Piece]) -> frozenset[tuple[str, int]]:
        ranges: set[tuple[str, int]] = set()
        for piece in pieces:
            segments = self.segments(epoch, piece.edge_set, piece.ranges)
            cells = {segment.cell % self.num_ranges**2 for segment in segments if len(segment)}
            set_counts = self.counts[piece.edge_set].reshape(len(self.types), -1)
            for number in np.flatnonzero(set_counts[:, sorted(cells)].any(axis=1)).tolist():
                lhs, rhs = self.types[number]
                # Wrong answers of a mixed bucket are of both ranges, whatever the right one is of.
                if self.is_mixed:
                    ranges |= {(name, number) for name in (lhs, rhs) for number in piece.ranges}
                else:
                    ranges |= {(lhs, piece.ranges[0]), (rhs, piece.ranges[1])}
        return frozenset(ranges)


class BucketBatches(EdgeBatches):
    """Selects this trainer's triples of each global batch, in bucket order.

    A chunk of positives belongs to one machine and one bucket, so its negatives can come from the ranges of
    the bucket's pair.
    """

    _searches_triples = False  # triples are rows of the buckets already

    def __init__(self, buckets: EdgeBuckets, walk: BucketOrder, mark: int, options: EdgeOptions) -> None:
        super().__init__(buckets.table, options)
        self.walk, self.order_mark, self._starts = walk, mark, buckets.starts
        self._watchers: list[Callable[[int, int], object]] = []
        self._last_buckets: tuple[int, list[int]] = (-1, [])

    def when_batch(self, watcher: Callable[[int, int], object]) -> None:
        """Register a function that gets epoch and number of a batch with new buckets, before it is trained.

        They are new if they are not those of the batch before.
        """
        self._watchers.append(watcher)

    def segments_at(self, epoch: int, index: int) -> frozenset[Segment]:
        """Return where the triples of the buckets of this machine's share of a global batch lie."""
        return self._segments_of(epoch, self.walk.pieces(epoch, *self.walk.window(index)))

    def segments_after(self, epoch: int, index: int) -> frozenset[Segment]:
        """Return those of the first bucket behind a global batch; after the last, of the next epoch."""
        return self._segments_of(*self.walk.bucket_after(epoch, index))

    def _segments_of(self, epoch: int, pieces: Sequence[Piece]) -> frozenset[Segment]:
        buckets = [(piece.edge_set, piece.ranges) for piece in pieces]
        return frozenset(chain.from_iterable(self.walk.segments(epoch, *bucket) for bucket in buckets))

    def rows_of(self, segment: Segment) -> tuple[int, int]:
        """Return the first row of a segment in the tables of triples, and the one behind its last."""
        start = int(self._starts[segment.cell])
        return start + segment.first, start + segment.end

    @property
    def triple_tables(self) -> list[np.ndarray]:
        """The mapped tables of triples, bucket after bucket: edges, triple ids, and weights if any."""
        tables = (self._all_edges, self._triple_ids, self._weights)
        return [table for table in tables if table is not None]

    def place(self, epoch: int, batches_done: int) -> dict[str, Any]:
        """Describe the bucket of the last batch that is done, for ``stats.jsonl``."""
        pieces = self.walk.pieces(epoch, *self.walk.window(max(0, batches_done - 1)))
        if not pieces:
            return {}
        ranges, turn = list(pieces[-1].ranges), pieces[-1].turn
        return {"bucket": ranges, "bucket_number": turn, "num_buckets": self.walk.num_buckets}

    def begin(self, epoch: int, index: int) -> None:
        if self._watchers:
            buckets = epoch, [piece.turn for piece in self.walk.pieces(epoch, *self.walk.window(index))]
            if buckets != self._last_buckets:
                self._last_buckets = buckets
                for watcher in self._watchers:
                    watcher(epoch, index)

    def pieces(self, epoch: int, index: int) -> list[tuple[Piece, Piece]]:
        """Return the buckets of a global batch: what the machine has of each, and what this trainer reads."""
        start, end = self.walk.window(index)
        share = self._share(end - start)
        pieces, passed = [], 0
        for piece in self.walk.pieces(epoch, start, end):
            first = max(share.start - passed, 0)
            stop = max(first, min(share.stop - passed, len(piece)))
            pieces.append((piece, replace(piece, start=piece.start + first, end=piece.start + stop)))
            passed += len(piece)
        return pieces

    def batch(self, epoch: int, index: int, enter: Callable[[str], None] = ignore_phase) -> EdgeBatch:
        enter("order")
        rows, chunks = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        ranges: list[tuple[int, int]] = []
        for piece, share in self.pieces(epoch, index):
            # Chunks are counted over all trainers of the machine: they draw the same negatives.
            if len(share):
                rows.append(self.walk.rows(epoch, share, self._starts))
                places = np.arange(share.start, share.end) - piece.start
                chunks.append(len(ranges) + places // self._options.chunk_size)
            ranges += [piece.ranges] * -(-len(piece) // self._options.chunk_size)
        batch_rows, batch_chunks = np.concatenate(rows), np.concatenate(chunks)
        size = sum(self.walk.shares.sizes(index))
        return self._gather((epoch, index, size), batch_rows, batch_chunks, enter, tuple(ranges))
