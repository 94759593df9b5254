"""Reads the files of all splits side by side: blocks are parsed and numbered on all cores, in any order.

Rows are collected in the order of the files, so the result does not depend on the number of threads. Arrow
and the compiled loops run without Python's lock, so threads do, and names need no copies between processes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore, Event

import numpy as np
import pyarrow as pa

from dglkge.data.text_format import ROLES, WEIGHT
from dglkge.data.triples import BLOCK_BYTES, Block, TripleFile
from dglkge.partition.rows import CollectedRows, pieces

IdsOf = Callable[[str, pa.Array], np.ndarray]
"""Returns the ids (n,) of the column of a role; several threads call it."""

Numbered = tuple[np.ndarray, np.ndarray | None]
"""Ids (n, 3) int32 of a block, and weights (n,) float32 if it has any."""

_MIN_BLOCK_BYTES = 1 << 20
_BLOCKS_A_WORKER = 2
_POLL_SECONDS = 0.2
_BYTES_A_BYTE = 4
"""Memory for each byte of a block of text: the text, Arrow's arrays and the ids."""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def bytes_at_a_time(max_memory: int, num_workers: int) -> int:
    """Return the size of a block for which all that are in memory take a quarter of the limit, if possible.

    Parameters
    ----------
    max_memory : int
        In bytes.
    num_workers : int
    """
    wanted = max_memory // (4 * _BYTES_A_BYTE * _BLOCKS_A_WORKER * num_workers)
    return min(max(wanted, _MIN_BLOCK_BYTES), BLOCK_BYTES)


@dataclass(frozen=True)
class SplitFiles:
    """The files of all splits.

    Attributes
    ----------
    files : mapping of str to sequence of TripleFile
        For each split.
    watch : callable
        Returns, for a file, the function to call with the number of its bytes read so far.
    num_workers : int
        Number of blocks that are parsed at a time.
    """

    files: Mapping[str, Sequence[TripleFile]]
    watch: Callable[[Path], Callable[[int], None]]
    num_workers: int = 1

    def collect(
        self, ids_of: IdsOf, folder: Path | None
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return ids (n, 3) int32 and weights (n,) float32 of each split; without weights there is no entry.

        Parameters
        ----------
        ids_of : callable
        folder : Path or None
            Folder for temporary files; None: in memory.

        Raises
        ------
        InputError
            If a file is wrong: that of the first wrong file.
        """
        num_files = sum(map(len, self.files.values()))
        num_readers = max(1, min(num_files, self.num_workers))
        reader = _Reader(self, ids_of, folder)
        splits, weights = {}, {}
        with ThreadPoolExecutor(num_readers) as readers:
            try:
                waiting = [(split, file) for split, files in self.files.items() for file in files]
                # Few files ahead: each has temporary files open.
                started: deque[Future[_FileRows]] = deque()
                for split, files in self.files.items():
                    rows = _FileRows(folder)
                    for _ in files:
                        while waiting and len(started) <= 2 * num_readers:
                            started.append(readers.submit(reader.read, waiting.pop(0)[1]))
                        found = started.popleft().result()
                        if len(files) == 1:
                            rows = found
                        else:
                            rows.extend(found)
                    splits[split] = rows.triples.array()
                    if rows.has_weights:
                        weights[split] = rows.weights.array()
            finally:
                # After an error, or Ctrl-C in result() above, the threads end at their next block.
                reader.stop()
                readers.shutdown(cancel_futures=True)
        return splits, weights


class _FileRows:
    """Ids and weights of a file, or of a split."""

    def __init__(self, folder: Path | None) -> None:
        self.triples = CollectedRows(folder, (3,), np.int32)
        self.weights = CollectedRows(folder, (), np.float32)
        self.has_weights = False

    def append(self, triples: np.ndarray, weights: np.ndarray | None) -> None:
        self.triples.append(triples)
        if weights is not None:
            self.has_weights = True
            self.weights.append(weights)

    def extend(self, other: _FileRows) -> None:
        triples = other.triples.array()
        weights = other.weights.array() if other.has_weights else None
        for rows, (piece,) in pieces(triples):
            self.append(piece, None if weights is None else weights[rows])


class _Reader:
    """Reads files, each in a thread of its own, and has their blocks parsed by common threads."""

    def __init__(self, files: SplitFiles, ids_of: IdsOf, folder: Path | None) -> None:
        self._files = files
        self._ids_of = ids_of
        self._folder = folder
        self._parsers = ThreadPoolExecutor(files.num_workers)
        # Blocks of all files that are in memory.
        self._room = BoundedSemaphore(_BLOCKS_A_WORKER * files.num_workers)
        self._stopped = Event()

    def stop(self) -> None:
        """End all threads at their next block."""
        self._stopped.set()
        self._parsers.shutdown(cancel_futures=True)

    def read(self, file: TripleFile) -> _FileRows:
        """Return the rows of a file."""
        rows, report = _FileRows(self._folder), self._files.watch(file.path)
        pending: deque[tuple[int, Future[Numbered]]] = deque()

        def take_one() -> None:
            position, future = pending.popleft()
            try:
                rows.append(*future.result())
            finally:
                self._room.release()
            report(position)

        try:
            blocks = file.blocks()
            while not self._stopped.is_set():
                # Room comes of the oldest block of this file, or else of another file's.
                if not self._room.acquire(timeout=0 if pending else _POLL_SECONDS):
                    if pending:
                        take_one()
                    continue
                try:
                    block = next(blocks, None)
                except BaseException:
                    self._room.release()
                    # Of two errors in a file, the one that stands first counts.
                    while pending:
                        take_one()
                    raise
                if block is None:
                    self._room.release()
                    break
                pending.append((block.position, self._parsers.submit(self._number, file, block)))
            while pending and not self._stopped.is_set():
                take_one()
            # Empty lines at the end are in no block.
            report(file.path.stat().st_size)
        finally:
            # The readers of earlier files need the room that an error leaves.
            for _, future in pending:
                future.cancel()
                self._room.release()
        return rows

    def _number(self, file: TripleFile, block: Block) -> Numbered:
        arrays = file.arrays(block)
        triples = np.empty((len(arrays[ROLES[0]]), 3), np.int32)
        for column, role in enumerate(ROLES):
            triples[:, column] = self._ids_of(role, arrays[role])
        weights = arrays[WEIGHT].to_numpy().astype(np.float32) if WEIGHT in arrays else None
        return triples, weights
