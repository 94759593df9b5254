"""Rows on their way into a file: put in order, summed up and written at the same time, block by block."""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from dglkge.checkpoint import hdf5_format

NUM_BLOCKS_IN_MEMORY = 4
"""Blocks of rows that are being put in order or wait to be written."""

NUM_BLOCKS_BETWEEN_ADVICE = 8
"""Blocks after which the disk is told to begin; each time the kernel waits for all cores for a moment."""


def fill_rows(path: Path, tables: Mapping[str, torch.Tensor], order: torch.Tensor) -> int:
    """Write rows in a given order to their places in a closed file.

    The disk begins at once and not when the file is synced, and what it has leaves the page cache: a
    version must not push out of memory what training reads.

    Parameters
    ----------
    path : Path
        A file in which :func:`dglkge.checkpoint.hdf5_format.allocate_rows` has made place.
    tables : mapping of str to (n, ...) tensor
        Rows by dataset.
    order : (n,) int64 tensor
        Row i of the file is ``values[order[i]]``.

    Returns
    -------
    int
        CRC-32 of the whole file.

    Raises
    ------
    OSError
        If there is no room on the disk.
    """
    with hdf5_format.open_file(path) as file:
        places = {name: file[name].id.get_offset() for name in tables}
    # An empty dataset has no place, and no blocks either.
    in_file_order = sorted((place, name) for name, place in places.items() if place is not None)
    checksum = 0
    with open(path, "r+b", buffering=0) as raw, _BlockWriter(raw) as writer:
        for place, name in in_file_order:
            checksum = _pass_over(raw, writer.position, place, checksum)
            writer.position = place
            for block in _ordered_blocks(tables[name].detach().numpy(), order.numpy(), writer):
                checksum = zlib.crc32(block, checksum)
                writer.write(block)
        return _pass_over(raw, writer.position, os.fstat(raw.fileno()).st_size, checksum)


class _BlockWriter:
    """Writes blocks one after the other in a thread, in memory that is used again.

    Parameters
    ----------
    raw : io.FileIO
    """

    def __init__(self, raw: io.FileIO) -> None:
        self.position = 0
        self._num_written = 0
        self._raw = raw
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dglkge-checkpoint-blocks")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> _BlockWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for all blocks."""
        self._thread.shutdown()
        while self._waiting:
            self._waiting.popleft().result()

    def wait_for_memory(self) -> None:
        """Return when the memory of all but the last blocks may be used again."""
        while len(self._waiting) >= NUM_BLOCKS_IN_MEMORY:
            self._waiting.popleft().result()

    def write(self, block: memoryview) -> None:
        """Write a block behind the one before; see :meth:`wait_for_memory` for when its memory is free."""
        try:
            self._waiting.append(self._thread.submit(self._write, block, self.position))
        except RuntimeError:
            # The interpreter is shutting down and starts no thread, but waits for this one, which now writes.
            self._write(block, self.position)
        self.position += block.nbytes

    def _write(self, block: memoryview, place: int) -> None:
        descriptor, written = self._raw.fileno(), 0
        while written < block.nbytes:
            written += os.pwrite(descriptor, block[written:], place + written)
        self._num_written += 1
        if self._num_written % NUM_BLOCKS_BETWEEN_ADVICE == 0:
            with contextlib.suppress(OSError):  # advice only; some disks take none
                # What is not on the disk yet begins to be written; what is leaves the cache.
                os.posix_fadvise(descriptor, 0, place + written, os.POSIX_FADV_DONTNEED)


def _ordered_blocks(values: np.ndarray, order: np.ndarray, writer: _BlockWriter) -> Iterator[memoryview]:
    """Yield the bytes of rows in a given order, in memory that the writer has done with.

    By numpy and not by torch, whose threads would wait for one another on cores that training has taken.
    """
    memories: list[np.ndarray] = []
    for start, stop in hdf5_format.row_blocks(values.shape, values.itemsize):
        writer.wait_for_memory()
        if len(memories) < NUM_BLOCKS_IN_MEMORY:
            memories.append(np.empty((stop - start, *values.shape[1:]), dtype=values.dtype))
        else:
            memories.append(memories.pop(0))
        block = memories[-1][: stop - start]
        np.take(values, order[start:stop], axis=0, out=block, mode="clip")  # "raise" would copy once more
        yield block.reshape(-1).view(np.uint8).data


def _pass_over(raw: io.FileIO, start: int, stop: int, checksum: int) -> int:
    """Add what HDF5 itself wrote between two datasets to a checksum."""
    while start < stop:
        piece = os.pread(raw.fileno(), min(stop - start, hdf5_format.BLOCK_BYTES), start)
        if not piece:
            raise OSError(f"{raw.name} ends at {start}, expected {stop} bytes")
        checksum = zlib.crc32(piece, checksum)
        start += len(piece)
    return checksum
