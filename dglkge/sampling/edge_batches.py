"""Batches of a machine's own edges, in the order of the whole graph or in one of each machine.

In an order of the machines (``sampling.order: machine``) the cost of a trainer does not grow with their
number. A global batch takes a proportional share of every machine's triples, in a keyed permutation of the
machine. So a trainer computes the order of its own triples only, and looks none of them up. Chunks of
positives lie within a machine: it meets the negatives of its own chunks, not those of the whole batch. The
result depends on how the graph is partitioned, and not on the number of trainers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dglkge.data.partition_layout import EdgeTable, Rows
from dglkge.data.sorted_arrays import is_first
from dglkge.kernels.hashing import combine
from dglkge.kernels.triple_rows import find_rows
from dglkge.sampling import triple_order
from dglkge.sampling.triple_order import EdgeSet, TripleOrder
from dglkge.typing import Floats, Ids

TRIPLES_A_GROUP = 50
"""What a group costs beside its triples, in triples: its negatives, and calls (measured with 200 of them)."""

IDS_A_BUCKET = 32
"""Mean number of the partition's triples in a bucket: between half of this and this. The index takes 0.25 to
0.5 bytes per triple."""


class TripleIndex:
    """Finds triples among those of a partition.

    On several machines every trainer looks all triples of a global batch up, those of the others too; a
    binary search over the whole partition would take longer than to read the edges that it finds. So
    triple ids are cut into buckets of equal width, and only a bucket is searched.

    Parameters
    ----------
    triple_ids : (m,) int64
        The partition's, ascending.

    Examples
    --------
    >>> index = TripleIndex(np.array([2, 3, 7]))
    >>> index.find(np.array([7, 5, 2, 9]))
    (array([0, 2]), array([2, 0]))
    """

    def __init__(self, triple_ids: Ids) -> None:
        self._triple_ids = triple_ids
        num_ids = int(triple_ids[-1]) + 1 if len(triple_ids) else 0
        # The width is rounded down to a power of two: the bucket of an id is then one shift, without a
        # division.
        width = IDS_A_BUCKET * num_ids // max(1, len(triple_ids))
        self._shift = max(0, width.bit_length() - 1)
        # One bound more than buckets, so that bucket b ends at starts[b + 1] also for the last one.
        bounds = np.arange(0, (num_ids >> self._shift) + 2, dtype=np.int64) << self._shift
        self._starts = np.searchsorted(triple_ids, bounds)

    def find(self, triple_ids: Ids) -> tuple[Ids, Ids]:
        """Return the places (n,) of triples of the partition, ascending, and their rows (n,) in its edges."""
        rows = np.empty(len(triple_ids), np.int64)
        find_rows(triple_ids, self._triple_ids, self._starts, self._shift, rows)
        places = np.flatnonzero(rows >= 0)
        return places, rows[places]


Enter = Callable[[str], None]
"""Is called with the name of each phase as it begins."""

Ranges = tuple[tuple[int, int], ...]


def ignore_phase(phase: str) -> None:
    """Ignore the name of a phase."""


class EdgeGroup(NamedTuple):
    """A run of a batch's edges of one edge type and one chunk of the global batch: ``heads[start:end]``."""

    pair: int
    chunk: int
    start: int
    end: int


@dataclass(frozen=True)
class EdgeBatch:
    """One trainer's share of a global batch, sorted by chunk and edge type.

    Attributes
    ----------
    index : int
        Number of the global batch in the epoch.
    global_size : int
        Number of triples in the global batch, over all trainers.
    triple_ids : (B,) int64
        Rows in ``train.npy``.
    heads, relations, tails : (B,) int64
        Node ids.
    weights : (B,) float32 or None
    labels : (B,) float32 or None
        Confidences that the triples are true.
    ranges : tuple of (int, int)
        In bucket order: range of the heads and range of the tails of each chunk of this machine.
    """

    epoch: int
    index: int
    global_size: int
    triple_ids: Ids
    heads: Ids
    relations: Ids
    tails: Ids
    weights: Floats | None
    groups: tuple[EdgeGroup, ...]
    labels: Floats | None = None
    ranges: Ranges = ()

    def __len__(self) -> int:
        return len(self.heads)


@dataclass(frozen=True)
class EdgeOptions:
    """What batches of edges are made of, beside the edges.

    Attributes
    ----------
    pair_of_relation : (R,) int64
        Edge type of each relation, by the relation's node id.
    num_triples : int
        Training triples of the whole graph.
    chunk_size : int
        Triples in a row that share negatives.
    local_rank, trainers_per_machine : int
        Which of the machine's trainers this is; each takes a run of its edges.
    relation_weights : (R,) float32 or None
        Factor of the weights of each relation's triples, by the relation's node id.
    has_confidences : bool
        The edges' weights are confidences: labels, and no factors of losses.
    order : TripleOrder or None
        Order of an epoch; None: all triples as one set.
    """

    pair_of_relation: Ids
    num_triples: int
    batch_size: int
    chunk_size: int
    local_rank: int
    trainers_per_machine: int
    seed: int
    relation_weights: Floats | None = None
    has_confidences: bool = False
    order: TripleOrder | None = None


class EpochBatches:
    """Global batches of each epoch, in order.

    Attributes
    ----------
    order_mark : int
        0 where the order of an epoch depends on the triples alone, so that an epoch may be resumed on any
        partitions; else a checksum of what it depends on besides.
    """

    order_mark = 0

    def __len__(self) -> int:
        raise NotImplementedError

    def batch(self, epoch: int, index: int, enter: Callable[[str], None]) -> Any:
        """Return this trainer's share of a global batch; it may be empty.

        ``enter`` is called with the name of each phase as it begins: ``order``, then ``edges``.
        """
        raise NotImplementedError

    def begin(self, epoch: int, index: int) -> None:
        """Get to know that a batch will be trained next; it may have been made before."""

    def place(self, epoch: int, batches_done: int) -> dict[str, Any]:
        """Describe the place in the order after a number of batches, for ``stats.jsonl``: nothing here."""
        return {}


class EdgeBatches(EpochBatches):
    """Selects this trainer's triples of each global batch from the edges of its machine's partition."""

    _searches_triples = True

    def __init__(self, edges: EdgeTable, options: EdgeOptions) -> None:
        all_triples = EdgeSet("train", range(options.num_triples))
        self.order = options.order or TripleOrder([all_triples], options.seed)
        self._options, pair_of_relation = options, options.pair_of_relation
        # Plain arrays over the same mapped memory: numpy's memmap takes its time for every index.
        self._triple_ids, self._all_edges = np.asarray(edges.triple_ids), np.asarray(edges.edges)
        self._weights = None if edges.weights is None else np.asarray(edges.weights)
        self._has_types = len(np.unique(pair_of_relation[pair_of_relation >= 0])) > 1
        self._has_all = self._searches_triples and len(self._triple_ids) == options.num_triples
        is_searched = self._searches_triples and not self._has_all
        self._index = TripleIndex(self._triple_ids if is_searched else self._triple_ids[:0])

    def __len__(self) -> int:
        return triple_order.num_batches(self.order.num_positions, self._options.batch_size)

    def batch(self, epoch: int, index: int, enter: Callable[[str], None] = ignore_phase) -> EdgeBatch:
        enter("order")
        positions = triple_order.window(index, self._options.batch_size, self.order.num_positions)
        # One machine: a position's triple is its row, and the other trainers' need not be computed.
        if self._has_all:
            share = self._share(len(positions))
            places = np.arange(share.start, share.stop)
            rows = self.order.triple_ids(positions[share], epoch)
        else:
            # Every trainer computes the whole window and keeps the triples that it owns: no trainer sends ids
            # to another.
            places, rows = self._index.find(self.order.triple_ids(positions, epoch))
            share = self._share(len(places))
            places, rows = places[share], rows[share]
        # Chunks belong to positions of the global batch, not to trainers: all machines draw the same
        # negatives.
        chunks = places // self._options.chunk_size
        return self._gather((epoch, index, len(positions)), rows, chunks, enter)

    def _gather(
        self, numbers: tuple[int, int, int], rows: Ids, chunks: Ids, enter: Enter, ranges: Ranges = ()
    ) -> EdgeBatch:
        """Read the edges of a share, by rows of the edge table, and sort them by chunk and edge type.

        ``numbers`` are epoch, index and global size of the batch.
        """
        enter("edges")
        # Rows are gathered first and transposed after: one pass over the mapped file. The copy makes each
        # column contiguous; ids of 32 bits become those of 64 that everything else takes.
        heads, relations, tails = np.take(self._all_edges, rows, axis=0).T.astype(np.int64, order="C")
        pairs = self._options.pair_of_relation[relations]
        # Places ascend, so the chunks are sorted already; with one edge type nothing is left to sort.
        order: Ids | slice = slice(None)
        if self._has_types:
            order = np.lexsort((pairs, chunks))
            order = order[self._run_of_groups(_bounds(chunks[order], pairs[order]))]
        heads, relations, tails = heads[order], relations[order], tails[order]
        weights, labels = None if self._weights is None else self._weights[rows[order]], None
        if self._options.has_confidences:
            weights, labels = None, weights
        if self._options.relation_weights is not None:
            relation_weights = self._options.relation_weights[relations]
            weights = relation_weights if weights is None else weights * relation_weights
        groups = _groups(chunks[order], pairs[order])
        ids = (rows if self._has_all else self._triple_ids[rows])[order]
        return EdgeBatch(*numbers, ids, heads, relations, tails, weights, groups, labels, ranges)

    def _share(self, num: int) -> slice:
        """Return which of the machine's triples are read: this trainer's run, so that it has few chunks.

        With several edge types all, of which it takes a run once they are sorted, so that it has few groups.
        """
        return slice(0, num) if self._has_types else self._run(num)

    def _run(self, num: int) -> slice:
        return trainer_share(num, self._options.local_rank, self._options.trainers_per_machine)

    def _run_of_groups(self, bounds: Ids) -> slice:
        """Return this trainer's run of sorted triples, in groups with these bounds (G + 1,)."""
        rank, trainers = self._options.local_rank, self._options.trainers_per_machine
        return slice(*(cut_at(bounds, turn / trainers) for turn in (rank, rank + 1)))


def cut_at(bounds: Ids, share: float) -> int:
    """Return where triples in groups with bounds (G + 1,) are cut: those before have a share of the cost.

    A group that is divided costs more: no part of one is smaller than :data:`TRIPLES_A_GROUP`.

    Examples
    --------
    >>> [cut_at(np.array([0, 10, 20, 1000]), share) for share in (0, 0.1, 0.5, 1)]
    [0, 20, 488, 1000]
    """
    costs = bounds + TRIPLES_A_GROUP * np.arange(len(bounds))
    cut = int(np.interp(share * costs[-1], costs, bounds))
    nearest = int(bounds[np.argmin(np.abs(bounds - cut))])
    return nearest if abs(nearest - cut) < TRIPLES_A_GROUP else cut


def trainer_share(num: int, local_rank: int, trainers_per_machine: int) -> slice:
    """Return which of a machine's elements are a trainer's: one of nearly equal runs."""
    start, stop = (num * rank // trainers_per_machine for rank in (local_rank, local_rank + 1))
    return slice(start, stop)


def _bounds(chunks: Ids, pairs: Ids) -> Ids:
    """Return the bounds (G + 1,) of the runs of equal (chunk, pair)."""
    return np.append(np.flatnonzero(is_first(chunks, pairs)), len(chunks))


def _groups(chunks: Ids, pairs: Ids) -> tuple[EdgeGroup, ...]:
    """Find the runs of equal (chunk, pair)."""
    bounds = _bounds(chunks, pairs)
    starts, ends = bounds[:-1], bounds[1:]
    columns = (pairs[starts], chunks[starts], starts, ends)
    return tuple(EdgeGroup(*run) for run in zip(*(column.tolist() for column in columns)))


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
        set_windows = []
        for number, (first, behind) in enumerate(zip(self._bounds, self._bounds[1:])):
            low, high = max(start, first) - first, min(end, behind) - first
            if low < high:
                size = behind - first
                sizes = [counts[number] for counts in self._counts]
                windows = [(num * low // size, num * high // size) for num in sizes]
                set_windows.append((number, windows))
        return set_windows

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
    set_rows: list[Rows] = []
    for number, edge_set in enumerate(order.sets):
        ids, holds_out = edge_set.triple_ids, order.num_held_out[number] > 0
        first, end = np.searchsorted(triple_ids, [ids[0], ids[-1] + 1]).tolist() if len(ids) else (0, 0)
        if isinstance(ids, range) and not holds_out:
            set_rows.append(range(first, end))
            continue
        blocks = [np.empty(0, dtype)]
        for start in range(first, end, ROWS_A_BLOCK):
            block = triple_ids[start : min(start + ROWS_A_BLOCK, end)]
            places = block - ids.start if isinstance(ids, range) else np.searchsorted(ids, block)
            # Between the first and the last of a scattered set are triples of others.
            kept = edge_set.at(places) == block
            if holds_out:
                kept[kept] = order.is_trained(number, places[kept])
            blocks.append((start + np.flatnonzero(kept)).astype(dtype))
        set_rows.append(np.concatenate(blocks))
    return set_rows


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
        self, edges: EdgeTable, rows: Sequence[Rows], counts: Ids, part: int, mark: int, options: EdgeOptions
    ) -> None:
        super().__init__(edges, options)
        self.order_mark, self._rows, self._part = mark, rows, part
        self._shares = MachineShares(counts, self._options.batch_size)

    def batch(self, epoch: int, index: int, enter: Callable[[str], None] = ignore_phase) -> EdgeBatch:
        enter("order")
        sizes = self._shares.sizes(index)
        num_triples = sizes[self._part]
        share = self._share(num_triples)
        rows, passed = [np.empty(0, np.int64)], 0
        for number, windows in self._shares.windows(index):
            start, end = windows[self._part]
            # The trainer's part of the machine's triples of this set.
            first, stop = max(share.start - passed, 0), min(share.stop - passed, end - start)
            if first < stop:
                rows.append(self._rows_at(number, epoch, start + first, start + stop))
            passed += end - start
        batch_rows = np.concatenate(rows)
        # All trainers of a machine cut its share alike, so those of a chunk draw the same negatives.
        before = sum(num_chunks(size, self._options.chunk_size) for size in sizes[: self._part])
        places = np.arange(share.start, share.stop)
        chunks = before + places * num_chunks(num_triples, self._options.chunk_size) // max(1, num_triples)
        return self._gather((epoch, index, sum(sizes)), batch_rows, chunks, enter)

    def _rows_at(self, number: int, epoch: int, start: int, end: int) -> Ids:
        """Return the rows at the positions [start, end) of the machine's order of an edge set."""
        rows = self._rows[number]
        key = combine(_MACHINE_KEY, self._options.seed, number, self._part)
        positions = np.arange(start, end, dtype=np.int64)
        places = triple_order.inverse_permute(positions, len(rows), key, epoch)
        return places + rows.start if isinstance(rows, range) else rows[places].astype(np.int64)
