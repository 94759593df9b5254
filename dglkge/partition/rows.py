"""Rows of triples that are larger than memory: collected in a file, and read a bounded number at a time."""

from __future__ import annotations

import io
import mmap
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from dglkge.errors import StorageError, os_errors

ROWS_AT_A_TIME = 1 << 20
_DENSE = 1 << 26

Item = TypeVar("Item")
Result = TypeVar("Result")


class CollectedRows:
    """An array that grows by blocks of rows, in a file without a name, or in memory (None).

    The file is gone when the process ends, however it ends. It is written and not mapped while it grows, so
    that a full disk is an error.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file = io.BytesIO() if folder is None else tempfile.TemporaryFile(dir=folder)

    def append(self, block: np.ndarray) -> None:
        """Add rows (n, ...); all blocks have one type and one shape of a row."""
        self._form = block[:0]
        with os_errors(StorageError, f"cannot write a temporary file in {self._folder}"):
            self._file.write(np.ascontiguousarray(block).data)
            self._file.flush()

    def array(self) -> np.ndarray:
        """Return all rows, (n, ...): of a file a map that may be written to."""
        form, num_bytes = self._form, self._file.tell()
        if isinstance(self._file, io.BytesIO):
            rows = np.frombuffer(self._file.getbuffer(), form.dtype)
        else:
            # An empty file cannot be mapped.
            rows = np.memmap(self._file, form.dtype, "r+") if num_bytes else form
        return rows.reshape(-1, *form.shape[1:])


def pieces(*arrays: np.ndarray) -> Iterator[tuple[slice, tuple[np.ndarray, ...]]]:
    """Yield equal slices of arrays of one length, and give back the pages of a mapped file after each."""
    for start in range(0, len(arrays[0]), ROWS_AT_A_TIME):
        piece = slice(start, min(start + ROWS_AT_A_TIME, len(arrays[0])))
        yield piece, tuple(array[piece] for array in arrays)
        for array in arrays:
            release(array)


def open_npy(path: Path, dtype: str, shape: tuple[int, ...]) -> BinaryIO:
    """Open a ``.npy`` file behind its header, to write an array into."""
    file = open(path, "wb")
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int
) -> Iterator[Result]:
    """Yield the result of each item in order; threads compute a bounded number ahead.

    An exception, of the function or of an item, is raised when its turn comes; then, and if the caller stops,
    the threads end with what they have begun.
    """
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(num_workers) as threads:

        def submitted() -> Iterator[Future[Result]]:
            try:
                for item in items:
                    yield threads.submit(function, item)
            except Exception as error:
                failed: Future[Result] = Future()
                failed.set_exception(error)
                yield failed

        try:
            for future in submitted():
                pending.append(future)
                if len(pending) > num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)


def release(array: np.ndarray) -> None:
    """Give back the pages of a mapped file to the kernel, which keeps what was written to them."""
    base = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap) and isinstance(base.base, mmap.mmap):
            base.base.madvise(mmap.MADV_DONTNEED)
            return
        base = base.base  # type: ignore[assignment]


def distinct_below(arrays: Sequence[np.ndarray], *columns: int) -> np.ndarray:
    """Return the distinct numbers of some columns of arrays of rows, ascending; they are from 0 on."""

    def numbers() -> Iterator[np.ndarray]:
        return (rows[:, column] for array in arrays for _, (rows,) in pieces(array) for column in columns)

    largest = max((int(piece.max()) for piece in numbers()), default=-1)
    return distinct_numbers(numbers(), largest + 1, max(_DENSE, 4 * sum(map(len, arrays))))


def distinct_numbers(numbers: Iterable[np.ndarray], end: int, max_dense: int = _DENSE) -> np.ndarray:
    """Return the distinct numbers of some arrays, ascending; they are from 0 to below the end."""
    if end > max_dense:
        # Few numbers of a large range: one byte for each number of it would be gigabytes.
        distinct = np.empty(0, np.int64)
        for piece in numbers:
            distinct = np.union1d(distinct, piece)
        return distinct
    occurs = np.zeros(end, bool)
    for piece in numbers:
        occurs[piece] = True
    return np.flatnonzero(occurs)
