"""Rows of a table that are a file on a disk, mapped into memory: what to read ahead and what to write back.

Only advice to the kernel: no number changes, whatever it does. Addresses and lengths are those of a tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.distributed.jobs import is_on_disk

MADV_RANDOM, MADV_WILLNEED, MADV_DONTNEED, MADV_COLD, MADV_POPULATE_WRITE = 1, 3, 4, 20, 23
"""Numbers of Linux's madvise(2); the last two since the versions 5.4 and 5.14."""

SYNC_FILE_RANGE_START, SYNC_FILE_RANGE_ALL = 2, 1 | 2 | 4
"""Of sync_file_range(2): start to write dirty pages; wait for writes that run, start, and wait for them."""

BYTES_A_CALL = 8 << 20
"""Bytes of a call: the thread that advises can be stopped between two of them."""

WAIT_SECONDS, POLL_SECONDS = 0.5, 0.002
"""How long a process waits for others to read or to unmap a piece, and how often it looks."""

MOST_VAIN = 20
"""Waits in a row that may be in vain: some file systems keep pages, whatever is advised."""

MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class MappedFile:
    """A file behind the addresses [start, end), of which the first is `offset` bytes in it.

    Of shared memory writes go to the file.
    """

    path: str
    start: int
    end: int
    offset: int = 0
    is_shared: bool = True


def find_mapped_files(address: int, num_bytes: int, maps: Path = MAPS) -> list[MappedFile]:
    """Return the files that are mapped at [address, address + num_bytes), in their order.

    Empty if some of it is memory or deleted, or without Linux.
    """
    try:
        lines = maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    files: list[MappedFile] = []
    place, stop = address, address + num_bytes
    for line in lines:
        # start-end rights offset device inode path
        fields = line.split(None, 5)
        first, end = (int(text, 16) for text in fields[0].split("-"))
        if place < stop and first <= place < end:
            if len(fields) < 6 or not fields[5].startswith("/") or fields[5].endswith(" (deleted)"):
                return []
            offset = int(fields[2], 16) + place - first
            files.append(MappedFile(fields[5], place, min(end, stop), offset, fields[1].endswith("s")))
            place = end
    return files if place >= stop else []


class MappedRows:
    """Consecutive rows of a mapped file, cut into ranges.

    Parameters
    ----------
    address, num_rows, row_bytes : int
        Where the rows are in memory.
    num_ranges : int
        Ranges of them, as :func:`dglkge.data.range_walk.range_bounds` cuts a partition.
    files : sequence of MappedFile
        Those of all the rows, to write their pages back.
    drops : bool
        Drop the pages that are pushed out from memory at once, instead of making them the next to go.
    is_leader : bool
        Whether this process reads, writes and drops pages for all processes of the machine. The others only
        map what comes, and unmap what is dropped: the kernel keeps pages that a process has mapped.
    """

    def __init__(
        self,
        address: int,
        num_rows: int,
        row_bytes: int,
        num_ranges: int,
        files: Sequence[MappedFile],
        drops: bool = False,
        is_leader: bool = True,
    ) -> None:
        self._drops, self._is_leader = drops, is_leader
        self._num_vain = 0
        self._address, self._row_bytes = address, row_bytes
        self._bounds = [num_rows * turn // num_ranges for turn in range(num_ranges + 1)]
        self._files = files
        libc = ctypes.CDLL(None, use_errno=True)
        self._madvise, self._mincore, self._sync = libc.madvise, libc.mincore, libc.sync_file_range
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
        self._sync.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

    @classmethod
    def from_tensor(
        cls, rows: Any, num_ranges: int, drops: bool = False, is_leader: bool = True
    ) -> MappedRows | None:
        """Return the rows (n, ...) of a contiguous tensor; None if they are in memory only."""
        address = rows.data_ptr() if rows.is_contiguous() else None
        return cls._of(rows, address, num_ranges, drops, is_leader)

    @classmethod
    def from_array(cls, rows: np.ndarray, drops: bool = False) -> MappedRows | None:
        """Return the rows (n, ...) of a mapped array, in one range; None if they are in memory only.

        Those that are dropped are read only where they are asked for: else a page that is absent brings its
        neighbours, up to ``read_ahead_kb`` of the disk, which may be megabytes that are not needed soon.
        """
        address = rows.ctypes.data if rows.flags.c_contiguous else None
        mapped = cls._of(rows, address, 1, drops, is_leader=True)
        if mapped is not None and drops:
            for address, num_bytes in mapped.pieces(0):
                mapped._madvise(address, num_bytes, MADV_RANDOM)
        return mapped

    @classmethod
    def _of(
        cls, rows: Any, address: int | None, num_ranges: int, drops: bool, is_leader: bool
    ) -> MappedRows | None:
        """Return contiguous rows at an address; None if there is none, or they are in memory only."""
        if address is None or not len(rows):
            return None
        before = address % mmap.PAGESIZE
        files = find_mapped_files(address - before, before + rows.nbytes)
        # Pages of a private mapping are this process's own: dropping them would lose what it wrote.
        if not files or not all(file.is_shared for file in files) or not is_on_disk(files[0].path):
            return None
        return cls(address, len(rows), rows.nbytes // len(rows), num_ranges, files, drops, is_leader)

    def pieces(self, number: int) -> list[tuple[int, int]]:
        """Return the address and length in bytes of each call for a range: whole pages inside the rows."""
        return self.pieces_between(self._bounds[number], self._bounds[number + 1])

    def pieces_between(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the pieces of the rows [first, stop), as :meth:`pieces` does for a range."""
        if first == stop:
            return []
        start, end = (self._address + row * self._row_bytes for row in (first, stop))
        # Advice takes whole pages; a page that two ranges share belongs to both.
        start -= start % mmap.PAGESIZE
        return [
            (place, min(BYTES_A_CALL, min(end, file.end) - place))
            for file in self._files
            for place in range(max(start, file.start), min(end, file.end), BYTES_A_CALL)
        ]

    def read_ahead(self, address: int, num_bytes: int) -> bool:
        """Start to read a piece; returns whether the kernel took the advice."""
        return not self._is_leader or self._madvise(address, num_bytes, MADV_WILLNEED) == 0

    def map_ahead(self, address: int, num_bytes: int) -> bool:
        """Map a piece for writing in this process, and wait until it is read.

        Otherwise each first write to a page enters the kernel, at 5 to 9 microseconds a page; many at once
        cost about 2 each, and not in the thread that trains. All pages of the piece count as written then.
        Older kernels refuse.

        All but the leader wait until it has read the piece: it reads one for each that it has written and
        dropped. They would read the whole range while the old one is still in memory.
        """
        if not self._is_leader:
            self._wait_until(lambda: self._is_in_memory(address, num_bytes))
        return self._madvise(address, num_bytes, MADV_POPULATE_WRITE) == 0

    def _is_in_memory(self, address: int, num_bytes: int) -> bool:
        """Return whether a page in the middle of a piece is in memory, which no other piece has a part of."""
        middle = address + num_bytes // 2
        flags = ctypes.create_string_buffer(1)
        return self._mincore(middle - middle % mmap.PAGESIZE, 1, flags) == 0 and bool(flags.raw[0] & 1)

    def _wait_until(self, is_done: Callable[[], object]) -> None:
        """Wait for another process, within a limit: what it does is of use, and nothing depends on it."""
        end = time.monotonic() + WAIT_SECONDS * (self._num_vain < MOST_VAIN)
        while not is_done():
            if time.monotonic() >= end:
                self._num_vain += 1
                return
            time.sleep(POLL_SECONDS)
        self._num_vain = 0

    def unmap(self, address: int, num_bytes: int) -> bool:
        """Unmap a piece that is pushed out next: the kernel drops no page that a process has mapped."""
        return not self._drops or self._madvise(address, num_bytes, MADV_DONTNEED) == 0

    def start_to_write(self, address: int, num_bytes: int) -> bool:
        """Start to write the dirty pages of a piece back; does not wait for the disk."""
        return not self._is_leader or self._ask(self._sync, address, num_bytes, SYNC_FILE_RANGE_START)

    def push_out(self, address: int, num_bytes: int) -> bool:
        """Write a piece back, and let the kernel take its memory; returns whether it took the advice.

        Blocks until the pages are on the disk, so that they are clean and cost nothing to drop, and for a
        while until all processes have unmapped them, since they stay till then. If memory held them beside
        what is read next, the kernel might have to look for memory, and would write all dirty pages.
        """
        if self._is_leader and not self._ask(self._sync, address, num_bytes, SYNC_FILE_RANGE_ALL):
            return False
        piece = address, num_bytes
        taken = self.drop(*piece)
        if self._drops and self._is_leader and num_bytes > 2 * mmap.PAGESIZE:
            self._wait_until(lambda: not (self._is_in_memory(*piece) and self.drop(*piece)))
        return taken

    def drop(self, address: int, num_bytes: int) -> bool:
        """Unmap a piece, and drop its clean pages from memory; or only make them the next to go.

        The mapping is shared, so that what was written stays: in the page cache, or in the file.
        """
        if not self._drops:
            return not self._is_leader or self._madvise(address, num_bytes, MADV_COLD) == 0
        taken = self._madvise(address, num_bytes, MADV_DONTNEED) == 0
        if self._is_leader:
            # Whole pages only: the kernel leaves the first and the last one if they are not.
            return self._ask(os.posix_fadvise, address, num_bytes, os.POSIX_FADV_DONTNEED) and taken
        return taken

    def _ask(self, call: Callable[..., object], address: int, num_bytes: int, advice: int) -> bool:
        """Make a system call for a piece of a file; returns False if that is gone, or the call fails."""
        mapped = self._files[bisect_right(self._files, address, key=lambda file: file.start) - 1]
        with contextlib.suppress(OSError), open(mapped.path, "rb", buffering=0) as file:
            call(file.fileno(), mapped.offset + address - mapped.start, num_bytes, advice)
            return True
        return False
