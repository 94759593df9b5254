"""Rows on their way out of a file: it is read once, block by block, and its checksum is taken on the way."""

from __future__ import annotations

import io
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Union

import h5py
import numpy as np

from dglkge.checkpoint import hdf5_format

NUM_BLOCKS_AHEAD = 4
"""Blocks that are read while the one before is put where it belongs."""

Rows = Union[h5py.Dataset, np.ndarray]


@dataclass(frozen=True)
class Piece:
    """A run of a file's bytes: rows of a dataset, or what lies between two datasets.

    Attributes
    ----------
    start, stop : int
        Bytes of the file.
    name : str or None
        The dataset.
    first_row : int
        Its first row in the piece.
    """

    start: int
    stop: int
    name: str | None = None
    first_row: int = 0


@dataclass(frozen=True)
class Span:
    """Where a dataset lies in a file: ``num_rows`` times ``row_bytes`` from ``offset`` on."""

    name: str
    offset: int
    num_rows: int
    row_bytes: int

    @property
    def stop(self) -> int:
        """The byte behind the last row."""
        return self.offset + self.num_rows * self.row_bytes


def plan_pieces(num_bytes: int, spans: Sequence[Span]) -> list[Piece]:
    """Cut a file into pieces, in order, that hold whole rows of one dataset or none.

    Datasets that lie outside of the file or inside one another, which no good file has, are not told from
    what lies between datasets.
    """
    pieces: list[Piece] = []
    place = 0
    for span in sorted(spans, key=lambda span: span.offset):
        if span.offset < place or span.stop > num_bytes:
            continue
        pieces += _between(place, span.offset)
        for first, last in hdf5_format.row_blocks((span.num_rows, span.row_bytes), 1):
            start, stop = (span.offset + row * span.row_bytes for row in (first, last))
            pieces.append(Piece(start, stop, span.name, first))
        place = span.stop
    return pieces + _between(place, num_bytes)


def _between(start: int, stop: int) -> list[Piece]:
    step = hdf5_format.BLOCK_BYTES
    return [Piece(place, min(stop, place + step)) for place in range(start, stop, step)]


class RowReader:
    """Yields ``(name, first row, rows)`` of a file's datasets, by blocks; a block is good until the next.

    Rows that lie in one run of the file come as the file has them, from a thread that reads ahead; others,
    compressed ones for instance, come after them.

    Parameters
    ----------
    path : Path
    datasets : mapping of str to array or h5py.Dataset
        Of the file, which is open, or in memory.

    Attributes
    ----------
    crc32 : int
        Of the whole file, once all has been yielded.
    """

    def __init__(self, path: Path, datasets: Mapping[str, Rows]) -> None:
        self.crc32 = 0
        self._path = path
        self._datasets = datasets
        spans = [span for name, rows in datasets.items() if (span := _span_of(name, rows)) is not None]
        self._pieces = plan_pieces(path.stat().st_size, spans)

    def __iter__(self) -> Iterator[tuple[str, int, np.ndarray]]:
        coming = iter(self._pieces)
        waiting: deque[tuple[Piece, bytearray, Future[None]]] = deque()
        largest = max((piece.stop - piece.start for piece in self._pieces), default=0)
        with (
            open(self._path, "rb", buffering=0) as raw,
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="dglkge-checkpoint-reader") as thread,
        ):
            free = [bytearray(largest) for _ in range(NUM_BLOCKS_AHEAD)]
            while True:
                while free and (piece := next(coming, None)) is not None:
                    memory = free.pop()
                    waiting.append((piece, memory, thread.submit(self._read, raw, piece, memory)))
                if not waiting:
                    break
                piece, memory, reading = waiting.popleft()
                reading.result()
                if piece.name is not None:
                    yield piece.name, piece.first_row, self._rows(piece, memory)
                free.append(memory)
        yield from self._others()

    def _read(self, raw: io.FileIO, piece: Piece, memory: bytearray) -> None:
        """Read the next piece; the thread takes them in order, as the checksum needs."""
        view = memoryview(memory)[: piece.stop - piece.start]
        done = 0
        while done < len(view):
            count = os.preadv(raw.fileno(), [view[done:]], piece.start + done)
            if count == 0:
                raise OSError(f"{self._path} ends at byte {piece.start + done}, expected {piece.stop}")
            done += count
        self.crc32 = zlib.crc32(view, self.crc32)

    def _rows(self, piece: Piece, memory: bytearray) -> np.ndarray:
        dataset = self._datasets[piece.name or ""]
        num_items = (piece.stop - piece.start) // dataset.dtype.itemsize
        return np.frombuffer(memory, dataset.dtype, num_items).reshape(-1, *dataset.shape[1:])

    def _others(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yield the rows that no piece holds."""
        in_pieces = {piece.name for piece in self._pieces}
        for name, rows in self._datasets.items():
            if name not in in_pieces:
                for start, stop in hdf5_format.row_blocks(rows.shape, rows.dtype.itemsize):
                    yield name, start, np.asarray(rows[start:stop])


def _span_of(name: str, rows: Rows) -> Span | None:
    """Return where rows lie in their file; None where they are no single run of it."""
    offset = rows.id.get_offset() if isinstance(rows, h5py.Dataset) else None
    if offset is None or rows.size == 0:
        return None
    row_bytes = int(np.prod(rows.shape[1:], dtype=np.int64)) * rows.dtype.itemsize
    return Span(name, offset, rows.shape[0], row_bytes)
