"""The triples of a partition grouped by edge set and bucket: files that are made once and mapped afterwards.

A bucket is a pair (range of the head, range of the tail). A head on another machine has the range that it has
there. Training then reads a bucket as one run of the file, in any number of processes; memory holds the
number of triples of each bucket only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.data import dataset_files
from dglkge.data.partition_layout import EdgeTable, PartitionLayout, Rows, load_array, load_edges, new_array
from dglkge.data.range_walk import range_bounds, ranges_of
from dglkge.data.sorted_arrays import place_by_group
from dglkge.errors import InputError, write_errors
from dglkge.typing import Ids

TRIPLES_A_BLOCK = 1 << 20
"""Triples that are sorted at a time: 32 MiB and their temporary copies."""


@dataclass(frozen=True)
class TrainedSets:
    """Which triples of a partition are trained, by edge set; by default all, as one set.

    Attributes
    ----------
    made_of : tuple
        What JSON can hold of them: it is equal only where the rows are.
    rows_of : callable
        Returns the rows of each set, by the triple ids (m,) of the partition.
    num_sets : int
    """

    made_of: tuple[Any, ...] = ()
    rows_of: Callable[[Ids], Sequence[Rows]] = lambda triple_ids: [range(len(triple_ids))]
    num_sets: int = 1


ALL_TRIPLES = TrainedSets()


@dataclass(frozen=True)
class EdgeBuckets:
    """The triples of a partition by bucket.

    Attributes
    ----------
    table : EdgeTable
        Its triples, set after set, and inside of a set bucket after bucket: (0, 0), (0, 1), ... Triple ids
        ascend inside a bucket only.
    counts : (S, K, P, P) int64
        Triples by edge set, edge type, range of the head and range of the tail.
    """

    table: EdgeTable
    counts: Ids

    @property
    def triples_of_sets(self) -> Ids:
        """Number of triples of each edge set: (S,)."""
        return self.counts.sum(axis=(1, 2, 3))

    @property
    def starts(self) -> Ids:
        """First row of each bucket of each set and, last, the number of triples: (S * P * P + 1,)."""
        return np.append(0, np.cumsum(self.counts.sum(axis=1).ravel())).astype(np.int64)

    def checksum(self) -> int:
        """Return a CRC-32 of the counts: the order of an epoch is the same only if it is equal."""
        return zlib.crc32(np.ascontiguousarray(self.counts).tobytes())


@dataclass(frozen=True)
class BucketFiles:
    """The files of the buckets of a partition, for the pairs of entity types (lhs, rhs) of the edge types.

    They are in the spare folder where that of the partition is read-only.
    """

    layout: PartitionLayout
    part: int
    num_ranges: int
    pairs: Sequence[tuple[str, str]]
    spare: Path
    sets: TrainedSets = ALL_TRIPLES

    def make(self, pair_of_relation: Ids) -> EdgeBuckets:
        """Open the buckets; they are made if they are absent or of other files.

        ``pair_of_relation`` is the edge type of each relation (R,), by node id.

        Raises
        ------
        CheckpointError, StorageError
            If neither folder can be written to, or the disk is full.
        """
        with contextlib.suppress(InputError):
            return self.open()
        made_of, edges = self._made_of(), self.layout.edge_table(self.part)
        home = self.layout.part_path(self.part)
        folder = self._folder(home if os.access(home, os.W_OK) else self.spare)
        with write_errors(f"cannot write the buckets of part {self.part} to {folder}"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            # What another process has mapped may stay on a network disk for a while.
            with tempfile.TemporaryDirectory(
                dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True
            ) as temporary:
                made = Path(temporary) / folder.name
                made.mkdir()
                self._write(made, edges, pair_of_relation)
                (made / dataset_files.BUCKETS_OF).write_text(json.dumps(made_of) + "\n", encoding="utf-8")
                _publish(made, folder)
        return self.open()

    def open(self) -> EdgeBuckets:
        """Map the buckets that :meth:`make` has made; memory holds their counts.

        Raises InputError if they are absent, damaged, or were made of other files.
        """
        made_of, layout = self._made_of(), self.layout
        problems = []
        for parent in (layout.part_path(self.part), self.spare):
            folder = self._folder(parent)
            try:
                recorded = dataset_files.load_json(folder / dataset_files.BUCKETS_OF)
                if recorded != made_of:
                    raise InputError(f"{folder} was made of other files: {recorded}, expected {made_of}")
                shape = (self.sets.num_sets, len(self.pairs), self.num_ranges, self.num_ranges)
                counts = np.array(load_array(folder / dataset_files.BUCKET_COUNTS, shape, np.int64))
                has_weights = layout.edge_table(self.part).weights is not None
                return EdgeBuckets(load_edges(folder, int(counts.sum()), has_weights), counts)
            except InputError as error:
                problems.append(error)
        raise problems[0]

    def _write(self, folder: Path, edges: EdgeTable, pair_of_relation: Ids) -> None:
        """Write the files by a counting sort: a pass that counts, and one that places each triple."""
        rows_of_sets = self.sets.rows_of(np.asarray(edges.triple_ids))
        names = {name for pair in self.pairs for name in pair}
        bounds = {name: range_bounds(self.layout.range_starts(name), self.num_ranges) for name in names}
        shape = (len(rows_of_sets), len(self.pairs), self.num_ranges, self.num_ranges)

        def numbered() -> Iterator[tuple[int, slice | Rows, Ids]]:
            """Yield a set's number, blocks of its rows, and edge type and bucket in one number."""
            for edge_set, block in _blocks(rows_of_sets):
                heads, relations, tails = np.asarray(edges.edges[block]).T
                pairs = pair_of_relation[relations]
                numbers = np.empty(len(heads), np.int64)
                for number, (lhs, rhs) in enumerate(self.pairs):
                    rows = np.flatnonzero(pairs == number)
                    first = ranges_of(heads[rows], bounds[lhs], self.num_ranges)
                    second = ranges_of(tails[rows], bounds[rhs], self.num_ranges)
                    numbers[rows] = (number * self.num_ranges + first) * self.num_ranges + second
                yield edge_set, block, numbers

        counts = np.zeros(shape, np.int64)
        for edge_set, _, numbers in numbered():
            counts[edge_set] += np.bincount(numbers, minlength=counts[0].size).reshape(shape[1:])
        np.save(folder / dataset_files.BUCKET_COUNTS, counts)
        by_bucket = counts.sum(axis=1).ravel()
        num, free = int(by_bucket.sum()), np.cumsum(by_bucket) - by_bucket
        sources = {dataset_files.TRIPLE_IDS: edges.triple_ids, dataset_files.EDGES: edges.edges}
        if edges.weights is not None:
            sources[dataset_files.WEIGHTS] = edges.weights
        targets = [new_array(folder / name, (num, *s.shape[1:]), s.dtype) for name, s in sources.items()]
        for edge_set, block, numbers in numbered():
            # Triple ids ascend inside a bucket, so the files do not depend on the size of blocks.
            buckets = edge_set * self.num_ranges**2 + numbers % self.num_ranges**2
            order, places = place_by_group(buckets, free)
            for source, target in zip(sources.values(), targets):
                target[places] = np.asarray(source[block])[order]
        for target in targets:
            target.flush()

    def _folder(self, parent: Path) -> Path:
        # A mark of the sets, so that runs with other sets do not replace the files.
        made_of = self.sets.made_of
        mark = f"{zlib.crc32(json.dumps(made_of).encode()):08x}" if made_of else ""
        return parent / dataset_files.buckets_folder(self.num_ranges, mark)

    def _made_of(self) -> dict[str, Any]:
        """Describe what buckets are made of, as JSON gives it back."""
        # Not a checksum of the edges: it would take as long as making the buckets. A data set that is written
        # again has another time of change.
        file = (self.layout.part_path(self.part) / dataset_files.EDGES).stat()
        return {
            "num_ranges": self.num_ranges,
            "edges_size_bytes": file.st_size,
            "edges_modified_ns": file.st_mtime_ns,
            "types": [list(pair) for pair in self.pairs],
            "starts": {name: self.layout.range_starts(name).tolist() for pair in self.pairs for name in pair},
            "sets": list(self.sets.made_of),
        }


def _blocks(rows_of_sets: Sequence[Rows]) -> Iterator[tuple[int, slice | Rows]]:
    """Yield the number of each set with its rows, some at a time."""
    for edge_set, rows in enumerate(rows_of_sets):
        for start in range(0, len(rows), TRIPLES_A_BLOCK):
            block = rows[start : start + TRIPLES_A_BLOCK]
            yield edge_set, slice(block.start, block.stop) if isinstance(block, range) else block


def _publish(made: Path, folder: Path) -> None:
    """Move a complete folder to its name; another job may do the same."""
    for number in range(10):
        try:
            made.rename(folder)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        # Of other files, or just made by another job: both are replaced by equal or newer ones. Whoever has
        # mapped the old files keeps them.
        with contextlib.suppress(FileNotFoundError):
            folder.rename(made.with_name(f"replaced{number}"))
    raise OSError(errno.EBUSY, "other jobs replace it again and again", str(folder))
