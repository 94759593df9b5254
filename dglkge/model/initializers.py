"""Initial rows as a pure function of (seed, table, original id, column).

Each pair of columns has its own 64 random bits. A table therefore starts the same however it is partitioned,
and any machine can make any row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dglkge.model.functions import hashing

BLOCK_PAIRS = 1 << 15
"""Pairs of columns drawn at a time: the working arrays stay in cache."""


def normal_rows(ids: np.ndarray, dim: int, seed: int, table: str, scale: float) -> np.ndarray:
    """Draw rows from a normal distribution of mean 0.

    Parameters
    ----------
    ids : (n,) int64 array
        Original ids.
    dim : int
        Numbers per row.
    seed : int
    table : str
        Name of the table: two tables do not start alike.
    scale : float
        Standard deviation.

    Returns
    -------
    (n, dim) float32 array
    """

    def fill(bits: np.ndarray, out: np.ndarray) -> None:
        """Box and Muller 1958: two uniforms, 32 bits each, to two normals."""
        # The 0.5 keeps the uniform number above 0, where the logarithm is finite. All in float64; rows are
        # rounded to float32 at the end.
        radius = np.sqrt(-2.0 * np.log(((bits >> np.uint64(32)) + 0.5) * 2.0**-32)) * scale
        angle = (bits & np.uint64(0xFFFFFFFF)) * (2.0 * math.pi * 2.0**-32)
        out[..., 0] = radius * np.cos(angle)
        out[..., 1] = radius * np.sin(angle)

    return _rows(ids, dim, seed, table, fill)


def uniform_rows(ids: np.ndarray, dim: int, seed: int, table: str, scale: float) -> np.ndarray:
    """Draw rows from the uniform distribution on [-scale, scale].

    Parameters and result are those of :func:`normal_rows`.
    """

    def fill(bits: np.ndarray, out: np.ndarray) -> None:
        out[..., 0] = (((bits >> np.uint64(32)) + 0.5) * 2.0**-31 - 1.0) * scale
        out[..., 1] = (((bits & np.uint64(0xFFFFFFFF)) + 0.5) * 2.0**-31 - 1.0) * scale

    return _rows(ids, dim, seed, table, fill)


def _rows(
    ids: np.ndarray, dim: int, seed: int, table: str, fill: Callable[[np.ndarray, np.ndarray], None]
) -> np.ndarray:
    """Draw (n, dim) numbers in blocks; ``fill`` turns bits (b, pairs) into numbers (b, pairs, 2)."""
    # An odd dimension drops the last number: a column's number is the same at any dimension.
    num_pairs = (dim + 1) // 2
    # Keyed by table name too: equal ids in two tables must not start with equal rows.
    keys_of_ids = hashing.row_keys(hashing.stream_key(seed, table), ids)
    rows = np.empty((len(ids), dim), np.float32)
    block_rows = max(1, BLOCK_PAIRS // max(1, num_pairs))
    for first in range(0, len(ids), block_rows):
        keys = keys_of_ids[first : first + block_rows]
        numbers = np.empty((len(keys), num_pairs, 2), np.float32)
        fill(hashing.column_bits(keys, num_pairs), numbers)
        rows[first : first + block_rows] = numbers.reshape(len(keys), 2 * num_pairs)[:, :dim]
    return rows
