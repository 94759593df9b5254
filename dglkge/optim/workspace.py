"""Memory of a trainer that is kept from step to step and only grows, and its threads.

Threads compute parts of compiled loops and of matmuls at the same time; both release the GIL. There are as
many as torch's own (``OMP_NUM_THREADS``, which the launcher sets). Parts depend on sizes and on that number
alone, so a result is the same in every run.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

Pieces = dict[Hashable, torch.Tensor]

_shared: Iterator[Pieces] | None = None


@contextlib.contextmanager
def sharing(pieces: list[Pieces]) -> Iterator[None]:
    """Let what is made in a block share its memory with what was made in an earlier block over the same list.

    The i-th :class:`Scratch` of a block has the pieces of the i-th of the others, so that two of the same
    objects, which never compute at the same time, take the memory of one.
    """

    def all_pieces() -> Iterator[Pieces]:
        yield from pieces
        while True:
            pieces.append({})
            yield pieces[-1]

    global _shared
    _shared = all_pieces()
    try:
        yield
    finally:
        _shared = None


class Scratch:
    """Pieces of memory by name, contents undefined; each is valid until its name is taken again.

    Fresh memory would be zeroed by the kernel, page by page, in every step. It is on the CPU without a
    device; ``pinned``: page-locked, so that copies to a GPU are asynchronous.

    Examples
    --------
    >>> scratch = Scratch()
    >>> scratch.take("rows", 2, 3).shape, scratch.take("rows", 1, 3).shape
    (torch.Size([2, 3]), torch.Size([1, 3]))
    """

    def __init__(self, device: torch.device | None = None, pinned: bool = False) -> None:
        self._pieces: Pieces = next(_shared) if _shared is not None and device is None and not pinned else {}
        self._device = device
        self._pinned = pinned

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.numel() * piece.element_size() for piece in self._pieces.values())

    def take(
        self, name: Hashable, num_rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return room for rows (num_rows, width)."""
        size = num_rows * width
        piece = self._pieces.get(name)
        if piece is None or piece.dtype != dtype or piece.numel() < size:
            # An eighth more if it grows: sizes vary from batch to batch (planning/memory.py: SPARE_SHARE).
            room = size if piece is None else size + size // 8
            piece = torch.empty(room, dtype=dtype, device=self._device, pin_memory=self._pinned)
            self._pieces[name] = piece
        return piece.as_strided((num_rows, width), (width, 1))

    def bytes(self, name: Hashable, num_bytes: int) -> np.ndarray:
        """Return room for bytes "(num_bytes,) uint8", in host memory."""
        return self.take(name, 1, num_bytes, torch.uint8)[0].numpy()


NUMBERS_A_PART = 1 << 16
"""Numbers that a part of a loop reads at least: some 60 microseconds, where a thread's start takes 10."""

PRODUCTS_A_TILE = 1 << 25
"""Multiplications of a tile at least: smaller tiles take up to half more time in all, to pack their rows."""

WHOLE = slice(None)
"""All rows; small chunks are not divided, so this is to cost nothing."""

_ROWS_A_TILE = 16
"""Tiles end at multiples of so many rows: oneDNN compiles a matmul for each new shape."""


class _Pool:
    """Threads that wait for work; they start when they are first needed."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[int, Callable[[], Any], SimpleQueue[Any]]] = SimpleQueue()
        self._num_threads = 0

    def run(self, parts: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call functions on as many threads; returns their results, or raises the first error."""
        while self._num_threads < len(parts):
            self._num_threads += 1
            threading.Thread(target=self._serve, name="part", daemon=True).start()
        done: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        for place, part in enumerate(parts):
            self._work.put((place, part, done))
        # Every part has ended when an error is raised: none still writes to memory that is reused.
        ended = sorted((done.get() for _ in parts), key=lambda part: part[0])
        for _, _, error in ended:
            if error is not None:
                raise error
        return [result for _, result, _ in ended]

    def _serve(self) -> None:
        torch.set_num_threads(1)  # of this thread: a part's matmul is not divided again
        while True:
            place, part, done = self._work.get()
            result, error = None, None
            try:
                result = part()
            except BaseException as raised:  # raised again by the thread that waits
                error = raised
            done.put((place, result, error))
            del part, done, result, error


_pool = _Pool()


def _forget() -> None:
    """Drop the threads: a forked process has none of them."""
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_forget)


def split(num_rows: int, width: int, work: Callable[[slice], Any]) -> list[Any]:
    """Call a function for parts of some rows, each on a thread; returns the results in the order of the rows.

    ``width`` is what each row costs, in numbers; few are one part, the slice :data:`WHOLE`.

    Examples
    --------
    >>> split(3, 400, lambda part: part)
    [slice(None, None, None)]
    """
    num_parts = min(torch.get_num_threads(), num_rows * width // NUMBERS_A_PART)
    if num_parts < 2:
        return [work(WHOLE)]
    bounds = [num_rows * place // num_parts for place in range(num_parts + 1)]
    return _pool.run([partial(work, slice(*ends)) for ends in zip(bounds, bounds[1:])])


def matmul(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write a product of (n, k) and (k, m) tensors in the host's memory to ``out`` (n, m)."""
    num_tiles = torch.get_num_threads()
    if num_tiles > 1:
        num_tiles = min(num_tiles, out.numel() * left.shape[1] // PRODUCTS_A_TILE)
    if num_tiles < 2:
        torch.mm(left, right, out=out)
        return
    # Two columns of tiles: a tile packs both of its operands, so narrow bands of rows cost more.
    num_bands = num_tiles // 2 if num_tiles > 8 else num_tiles
    rows, columns = _cuts(out.shape[0], num_bands), _cuts(out.shape[1], num_tiles // num_bands)

    def multiply(band: slice, column: slice) -> None:
        torch.mm(left[band], right[:, column], out=out[band, column])

    _pool.run([partial(multiply, band, column) for band in rows for column in columns])


def _cuts(size: int, num: int) -> list[slice]:
    """Return consecutive parts of nearly equal size, none empty."""
    bounds = [-(-size * place // num // _ROWS_A_TILE) * _ROWS_A_TILE for place in range(num)] + [size]
    return [slice(*ends) for ends in zip(bounds, bounds[1:]) if ends[0] < ends[1]]
