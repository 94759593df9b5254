"""Memory that is kept from batch to batch: fresh tens of megabytes a batch would all be page faults."""

from __future__ import annotations

import torch


class Scratch:
    """Named pieces of memory that only grow.

    Examples
    --------
    >>> scratch = Scratch()
    >>> scratch.take("rows", 2, 3).shape, scratch.take("rows", 1, 3).shape
    (torch.Size([2, 3]), torch.Size([1, 3]))
    """

    def __init__(self) -> None:
        self._pieces: dict[str, torch.Tensor] = {}

    def take(self, name: str, num_rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return room (num_rows, width), contents undefined; valid until the name is taken again."""
        wanted = num_rows * width
        piece = self._pieces.get(name)
        if piece is None or piece.dtype != dtype or len(piece) < wanted:
            piece = torch.empty(wanted + wanted // 8, dtype=dtype)
            self._pieces[name] = piece
        return piece[:wanted].view(num_rows, width)
