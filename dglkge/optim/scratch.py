"""Memory that is kept from step to step and only grows."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator

import numpy as np
import torch

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
        is_plain = device is None and not pinned
        self._pieces: Pieces = next(_shared) if _shared is not None and is_plain else {}
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
        if piece is None or piece.dtype != dtype or len(piece) < size:
            # An eighth more if it grows: sizes vary from batch to batch (planning/memory.py: SPARE_SHARE).
            room = size if piece is None else size + size // 8
            piece = torch.empty(room, dtype=dtype, device=self._device, pin_memory=self._pinned)
            self._pieces[name] = piece
        return piece[:size].view(num_rows, width)

    def bytes(self, name: Hashable, num_bytes: int) -> np.ndarray:
        """Return room for bytes "(num_bytes,) uint8", in host memory."""
        return self.take(name, 1, num_bytes, torch.uint8)[0].numpy()
