"""Loops over the touched rows, generated from formulas: merge the gradient of each row, and update it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray

from dglkge.kernels.chains import add_chain
from dglkge.kernels.jit import compiled, compiled_inline, overload
from dglkge.kernels.rows import LOOKAHEAD, prefetch_bytes, prefetch_row, row_at
from dglkge.kernels.rules import add_decay, average, clip_row, decay_row, is_finite, limit_row


@compiled_inline
def _row_of(array: ndarray, place: int) -> ndarray:
    """Row of a contiguous array "(N, W)". By its address: numba counts no references to such a view."""
    return row_at(array.ctypes.data + place * array.strides[0], array.shape[1], array)


def _rows_of(arrays: tuple, place: int) -> tuple:
    """Row of each of some arrays."""
    raise NotImplementedError("for compiled loops only")


@overload(_rows_of, jit_options={"forceinline": True})
def _first_and_rest(arrays: Any, place: Any) -> Any:
    # By recursion over types: numba has no other loop that makes a tuple.
    def none(arrays: Any, place: Any) -> Any:
        return ()

    def rows(arrays: Any, place: Any) -> Any:
        return (_row_of(arrays[0], place),) + _rows_of(arrays[1:], place)

    return rows if len(arrays) else none


def _prefetch(arrays: tuple, place: int) -> None:
    """Prefetch the row of each of some arrays."""
    raise NotImplementedError("for compiled loops only")


@overload(_prefetch, jit_options={"forceinline": True})
def _prefetch_each(arrays: Any, place: Any) -> Any:
    def none(arrays: Any, place: Any) -> Any:
        return None

    def prefetch(arrays: Any, place: Any) -> Any:
        prefetch_row(arrays[0], place)
        _prefetch(arrays[1:], place)

    return prefetch if len(arrays) else none


@functools.cache
def update_loop(formula: Callable) -> Callable:
    """Return the compiled loop of an update rule.

    Parameters
    ----------
    formula : callable
        Compiled by :func:`dglkge.kernels.jit.compiled_inline`, with the arguments of those in ``rules``. The
        loop is cached under the formula's name and the digest of its source file.

    Returns
    -------
    callable
        Takes ``rows`` "(N, D)" and ``state``, a tuple of arrays "(N, W)", which change; ``targets`` "(n,)
        int64", the rows to update; ``selected`` "(n,) int64", the position of each target among the chains;
        ``chain`` = (heads, links, addresses, counts) of ``GradientRows``; ``links`` = (mean, max_row_norm,
        weight_decay, kept, max_norm), the numbers of the links, see ``links``; ``numbers`` of the formula.
        Returns the number of rows that were skipped because their gradient was not finite.
    """

    def update(
        rows: ndarray,
        state: tuple,
        targets: ndarray,
        selected: ndarray,
        chain: tuple,
        links: tuple,
        numbers: tuple,
    ) -> int:
        heads, next_sources, addresses, counts = chain
        mean, max_row_norm, weight_decay, kept, max_norm = links
        gradient = np.empty(rows.shape[1], rows.dtype)
        num_bad = 0
        for i in range(targets.shape[0]):
            ahead = i + LOOKAHEAD
            if ahead < targets.shape[0]:
                prefetch_bytes(addresses[heads[selected[ahead]]], rows.strides[0])
                prefetch_row(rows, targets[ahead])
                _prefetch(state, targets[ahead])
            row = _row_of(rows, targets[i])
            count = add_chain(heads[selected[i]], next_sources, addresses, counts, gradient)
            if not is_finite(gradient):
                # Row and state stay as they are: one such update could not be undone.
                num_bad += 1
                continue
            if mean:
                average(gradient, count)
            clip_row(gradient, max_row_norm)
            # After clipping: the limit is one of the loss's gradient.
            add_decay(gradient, row, weight_decay)
            decay_row(row, kept)
            formula(row, gradient, _rows_of(state, targets[i]), numbers)
            limit_row(row, max_norm)
        return num_bad

    # The name is that of the cache's file, and the one that profilers show.
    update.__name__ = update.__qualname__ = f"update_{formula.__name__}"
    return compiled(update)
