"""Links around an update rule, for one row and in place; a link whose number is neutral does nothing.

Between the merged gradient and the rule: :func:`average`, :func:`clip_row`, :func:`add_decay`. On the row,
before and after the rule: :func:`decay_row`, :func:`limit_row`. Their plain twins are in
``dglkge.optim.links``.
"""

from __future__ import annotations

import numpy as np

from dglkge.kernels.jit import compiled, compiled_inline


@compiled_inline
def is_finite(gradient: np.ndarray) -> bool:
    """Return whether a gradient "(D,)" has neither a NaN nor an infinity."""
    zero = gradient.dtype.type(0)
    # 0 times NaN or infinity is NaN, which stays in the sum: one vectorised pass without a branch a number.
    # It needs NaN to keep its meaning: see FAST_MATH in jit.
    poison = zero
    for j in range(gradient.shape[0]):
        poison += gradient[j] * zero
    return poison == zero


@compiled_inline
def average(gradient: np.ndarray, count: int) -> None:
    """Divide a sum of ``count`` gradients by their number."""
    if count > 1:
        share = gradient.dtype.type(1) / gradient.dtype.type(count)
        for j in range(gradient.shape[0]):
            gradient[j] *= share


@compiled_inline
def clip_row(gradient: np.ndarray, max_norm: float) -> None:
    """Scale a gradient that is longer than ``max_norm`` to that length; infinity: no limit."""
    if max_norm < np.inf:
        squares = gradient.dtype.type(0)
        for j in range(gradient.shape[0]):
            squares += gradient[j] * gradient[j]
        norm = np.sqrt(squares)
        if norm > max_norm:
            shrink = max_norm / norm
            for j in range(gradient.shape[0]):
                gradient[j] *= shrink


@compiled_inline
def add_decay(gradient: np.ndarray, row: np.ndarray, weight_decay: float) -> None:
    """Add a multiple of the row to its gradient (L2); 0: none."""
    if weight_decay != gradient.dtype.type(0):
        for j in range(gradient.shape[0]):
            gradient[j] += weight_decay * row[j]


@compiled_inline
def decay_row(row: np.ndarray, kept: float) -> None:
    """Multiply a row by what a decoupled weight decay keeps of it; 1: none."""
    if kept != row.dtype.type(1):
        for j in range(row.shape[0]):
            row[j] *= kept


@compiled_inline
def limit_row(row: np.ndarray, max_norm: float) -> None:
    """Scale a row that is longer than ``max_norm``, a float64, to that length; infinity: no limit."""
    if max_norm < np.inf:
        # In float64: a square of float32 may overflow.
        square = np.float64(0)
        for j in range(row.shape[0]):
            number = np.float64(row[j])
            square += number * number
        if square > max_norm * max_norm:
            scale = max_norm / np.sqrt(square)
            for j in range(row.shape[0]):
                row[j] = row[j] * scale


@compiled
def limit_norms(rows: np.ndarray, max_norm: float) -> None:
    """Scale the rows "(N, D)" that are longer than ``max_norm`` to that Euclidean length, in place."""
    for i in range(rows.shape[0]):
        limit_row(rows[i], max_norm)
