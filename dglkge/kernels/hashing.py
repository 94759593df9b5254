"""Pseudo-random numbers as a function of a key and a counter: every process computes any of them by itself.

The bits are the outputs of SplitMix64 (Steele, Lea and Flood 2014): state = key + position * gamma, mixed.
Row dropout (:func:`drop_numbers`) draws from them too: by a key, the row's id and the column. So does the
keyed permutation of the training order (:func:`walk_all`).
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy import ndarray

from dglkge.kernels.jit import compiled, compiled_inline, compiled_unaliased

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def stream_key(*words: int | str) -> ndarray:
    """Return a 64-bit key of a list of words without "/", (1,) uint64.

    Examples
    --------
    >>> bool(stream_key(7, "person") == stream_key(7, "place"))
    False
    """
    # Not hash(): Python salts it in each process, and all processes need the same key.
    digest = hashlib.blake2b("/".join(str(word) for word in words).encode(), digest_size=8).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def row_keys(key: ndarray, ids: ndarray) -> ndarray:
    """Return one key for each id, (n,) uint64."""
    return split_mix(key + ids.astype(np.uint64) * GOLDEN_GAMMA)


def column_bits(keys: ndarray, num_columns: int) -> ndarray:
    """Return 64 random bits for each key and column, (n, num_columns) uint64."""
    return split_mix(keys[:, None] + np.arange(1, num_columns + 1, dtype=np.uint64) * GOLDEN_GAMMA)


def in_range(bits: ndarray, limit: int) -> ndarray:
    """Map 64 random bits each to whole numbers int64 in [0, limit), uniformly; the limit is at most 2**63.

    The upper 64 bits of the 128-bit product with the limit (Lemire 2019). Probabilities of any two numbers
    differ by at most limit / 2**64 of themselves: 5e-11 at 10**9 entities.
    """
    # numpy has no 128-bit product: the sum of four products of 32-bit halves, with their carries.
    half, low_bits = np.uint64(32), np.uint64((1 << 32) - 1)
    high, low = bits >> half, bits & low_bits
    limit_high, limit_low = np.uint64(limit >> 32), np.uint64(limit & int(low_bits))
    first, second = high * limit_low, low * limit_high
    carried = (low * limit_low >> half) + (first & low_bits) + (second & low_bits)
    return (high * limit_high + (first >> half) + (second >> half) + (carried >> half)).astype(np.int64)


def split_mix(states: Any) -> Any:
    """Return SplitMix64's output for each state, uint64; overflow wraps around."""
    states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return states ^ (states >> np.uint64(31))


mix_word = compiled_inline(split_mix)
""":func:`split_mix` for one word, compiled: numpy warns of every overflow of a single number."""


# Sums are taken as Python integers and masked: numpy warns of overflow of a single uint64.
_MASK = (1 << 64) - 1


def combine(*parts: int) -> int:
    """Hash whole numbers, in their order, into one 64-bit key."""
    key = np.uint64(0)
    for part in parts:
        key = mix_word(np.uint64((int(key) + int(GOLDEN_GAMMA) + part) & _MASK))
    return int(key)


def words(key: int, counters: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return one 64-bit word for each counter (n,) int64 under a key from :func:`combine`: (n,) uint64."""
    return split_mix(counters.astype(np.uint64) * GOLDEN_GAMMA + np.uint64(key))


def below(key: int, count: int, limit: int) -> npt.NDArray[np.int64]:
    """Draw ``count`` whole numbers int64 from [0, limit), uniformly: see :func:`in_range`."""
    return in_range(words(key, np.arange(count, dtype=np.int64)), limit)


@compiled
def drop_numbers(rows: ndarray, ids: ndarray, key: np.uint64, limit: np.uint16, scale: np.float32) -> None:
    """Set numbers of rows (n, D) float32 with some ids (n,) to 0 and scale the others, in place.

    A number is kept where its 16 random bits are at least ``limit``.
    """
    words = np.empty(-(-rows.shape[1] // 4), np.uint64)
    # Four numbers of 16 bits from each word, the lowest bits first.
    bits = words.view(np.uint16)
    # Two loops without branches: the processor draws eight words, and masks 16 numbers, at a time.
    for row in range(len(rows)):
        _draw_words(mix_word(key + np.uint64(ids[row]) * GOLDEN_GAMMA), words)
        _scale_kept(rows[row], bits, limit, scale)


@compiled_unaliased
def _draw_words(state: np.uint64, words: ndarray) -> None:
    """Draw the random words of a row."""
    for place in range(len(words)):
        words[place] = mix_word(state + np.uint64(place + 1) * GOLDEN_GAMMA)


@compiled_unaliased
def _scale_kept(row: ndarray, bits: ndarray, limit: np.uint16, scale: np.float32) -> None:
    """Multiply each number of a row by the scale or by 0."""
    for column in range(len(row)):
        row[column] *= scale if bits[column] >= limit else np.float32(0)


@compiled
def walk_all(values: ndarray, num: int, a: int, b: int, keys: ndarray, forward: bool) -> None:
    """Permute each value "(n,) int64" of [0, num), in place; backwards by the inverse permutation.

    A Feistel network permutes [0, a b) with a b >= num, value = right * a + left, by a key "uint64" of each
    round. Values outside [0, num) are permuted again until they are inside (cycle walking), which is a
    bijection of [0, num).
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
