"""Compiled access to rows that lie anywhere in memory, by their addresses."""

from __future__ import annotations

import numpy as np

from dglkge.kernels.chains import LOOKAHEAD, pointer_to, prefetch_bytes
from dglkge.kernels.jit import carray, compiled


@compiled
def row_at(address: int, dim: int, like: np.ndarray) -> np.ndarray:
    """Return the row at an address, a view "(dim,)" of the type of ``like``."""
    return carray(pointer_to(address, like), (dim,))


@compiled
def prefetch_rows_at(addresses: np.ndarray, i: int, dim: int) -> None:
    """Ask for the i-th row, if there is one."""
    if i < addresses.shape[0]:
        prefetch_bytes(addresses[i], 4 * dim)


@compiled
def copy_rows(addresses: np.ndarray, rows: np.ndarray) -> None:
    """Copy the rows at addresses (n,) to an array (n, dim)."""
    num, dim = rows.shape
    for i in range(num):
        prefetch_rows_at(addresses, i + LOOKAHEAD, dim)
        rows[i] = row_at(addresses[i], dim, rows)
