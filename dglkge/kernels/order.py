"""Compiled loops of the training order: the keyed permutation (cycle walking), and a search in buckets."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from dglkge.kernels.hashing import GOLDEN_GAMMA, mix_word
from dglkge.kernels.jit import compiled


@compiled
def walk_all(values: ndarray, num: int, a: int, b: int, keys: ndarray, forward: bool) -> None:
    """Permute each value of [0, num), in place.

    A Feistel network permutes [0, a b) with a b >= num; values outside [0, num) are permuted again until they
    are inside (cycle walking), which is a bijection of [0, num).

    Parameters
    ----------
    values : ndarray
        "(n,) int64", changed.
    num : int
        Number of values of the permutation.
    a, b : int
        Sizes of the two halves of a value: value = right * a + left.
    keys : ndarray
        "(rounds,) uint64" key of each round.
    forward : bool
        False: the inverse permutation.
    """
    for i in range(values.shape[0]):
        value = values[i]
        while True:
            left, right = value % a, value // a
            for turn in range(keys.shape[0]):
                number = turn if forward else keys.shape[0] - 1 - turn
                if number % 2 == 0:
                    drawn = _draw(keys[number], right, a)
                    # The inverse adds a - drawn instead of subtracting: operands of % stay non-negative.
                    left = (left + (drawn if forward else a - drawn)) % a
                else:
                    drawn = _draw(keys[number], left, b)
                    right = (right + (drawn if forward else b - drawn)) % b
            value = right * a + left
            if value < num:
                break
        values[i] = value


@compiled
def _draw(key: Any, value: Any, limit: Any) -> Any:
    """Return the round function of a value: one word of the keyed hash, modulo the limit."""
    word = mix_word(np.uint64(value) * GOLDEN_GAMMA + key)
    # One bit is dropped, so that the word fits into int64 as a non-negative number.
    return np.int64((word >> np.uint64(1)) % np.uint64(limit))


@compiled
def find_rows(wanted: ndarray, triple_ids: ndarray, starts: ndarray, shift: int, rows: ndarray) -> None:
    """Write the row of each wanted id, -1 for ids that are absent.

    Parameters
    ----------
    wanted : ndarray
        "(n,) int64" ids to look up.
    triple_ids : ndarray
        "(N,) int64" sorted ids.
    starts : ndarray
        First row of each bucket, and N; a bucket holds the ids with the same ``id >> shift``.
    shift : int
        Logarithm of the number of ids in a bucket.
    rows : ndarray
        "(n,) int64", written.
    """
    last = starts.shape[0] - 2
    for i in range(wanted.shape[0]):
        rows[i] = -1
        bucket = wanted[i] >> shift
        if bucket > last:
            continue
        # Binary search (lower bound) inside the bucket.
        low, high = starts[bucket], starts[bucket + 1]
        while low < high:
            middle = (low + high) // 2
            if triple_ids[middle] < wanted[i]:
                low = middle + 1
            else:
                high = middle
        if low < starts[bucket + 1] and triple_ids[low] == wanted[i]:
            rows[i] = low
