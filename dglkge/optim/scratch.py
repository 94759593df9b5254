"""Memory that is kept from step to step and only grows."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch


class Scratch:
    """Pieces of memory by name, contents undefined; each is valid until its name is taken again.

    Fresh memory would be zeroed by the kernel, page by page, in every step.

    Parameters
    ----------
    device : torch.device, optional
        The CPU by default.
    pinned : bool
        Whether it is page-locked, so that copies to a GPU are asynchronous.

    Examples
    --------
    >>> scratch = Scratch()
    >>> scratch.take("rows", 2, 3).shape, scratch.take("rows", 1, 3).shape
    (torch.Size([2, 3]), torch.Size([1, 3]))
    """

    def __init__(self, device: torch.device | None = None, pinned: bool = False) -> None:
        self._pieces: dict[Hashable, torch.Tensor] = {}
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
