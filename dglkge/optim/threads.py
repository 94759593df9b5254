"""Threads of a trainer: parts of compiled loops and of matmuls at the same time; both release the GIL.

As many as torch's own (``OMP_NUM_THREADS``, which the launcher sets). Parts depend on sizes and on that
number alone, so a result is the same in every run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

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
