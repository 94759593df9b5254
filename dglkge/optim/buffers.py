"""Memory that is kept from step to step, so that a step touches no fresh pages."""

from __future__ import annotations

import numpy as np

_ALIGNMENT_BYTES = 8


def padded(num_bytes: int) -> int:
    """The next multiple of eight.

    Examples
    --------
    >>> padded(0), padded(1), padded(8)
    (0, 8, 8)
    """
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Buffer:
    """Bytes that only grow."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> np.ndarray:
        """The first ``num_bytes`` bytes, "(num_bytes,) uint8", contents undefined."""
        if num_bytes > len(self._bytes):
            self._bytes = np.empty(num_bytes + num_bytes // 4, np.uint8)
        return self._bytes[:num_bytes]

    def rows(self, num_rows: int, dim: int, dtype: np.dtype) -> np.ndarray:
        """Room for rows, "(num_rows, dim)" of ``dtype``, contents undefined."""
        return self.take(num_rows * dim * dtype.itemsize).view(dtype).reshape(num_rows, dim)
