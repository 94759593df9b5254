"""Dropout of the numbers of rows: which ones is a function of a key, the row's id and the column."""

from __future__ import annotations

import numpy as np

from dglkge.kernels.hashing import GOLDEN_GAMMA, mix_word
from dglkge.kernels.jit import compiled, compiled_unaliased


@compiled
def drop_numbers(
    rows: np.ndarray, ids: np.ndarray, key: np.uint64, limit: np.uint16, scale: np.float32
) -> None:
    """Set numbers of rows to 0 and scale the others, in place.

    Parameters
    ----------
    rows : (n, D) float32
    ids : (n,) int64
    key : uint64
    limit : uint16
        A number is kept where its 16 random bits are at least this.
    scale : float32
        Factor of the numbers that are kept.
    """
    words = np.empty(-(-rows.shape[1] // 4), np.uint64)
    # Four numbers of 16 bits from each word, the lowest bits first.
    bits = words.view(np.uint16)
    # Two loops without branches: the processor draws eight words, and masks 16 numbers, at a time.
    for row in range(len(rows)):
        _draw_words(mix_word(key + np.uint64(ids[row]) * GOLDEN_GAMMA), words)
        _scale_kept(rows[row], bits, limit, scale)


@compiled_unaliased
def _draw_words(state: np.uint64, words: np.ndarray) -> None:
    """Draw the random words of a row."""
    for place in range(len(words)):
        words[place] = mix_word(state + np.uint64(place + 1) * GOLDEN_GAMMA)


@compiled_unaliased
def _scale_kept(row: np.ndarray, bits: np.ndarray, limit: np.uint16, scale: np.float32) -> None:
    """Multiply each number of a row by the scale or by 0."""
    for column in range(len(row)):
        row[column] *= scale if bits[column] >= limit else np.float32(0)
