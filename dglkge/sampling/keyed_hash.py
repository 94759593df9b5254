"""Pseudo-random numbers that are functions of a key and a counter: any process computes any of them alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dglkge.model.counter_random import GOLDEN_GAMMA, split_mix

_MASK = (1 << 64) - 1
_GAMMA = int(GOLDEN_GAMMA)


def combine(*parts: int) -> int:
    """Hash whole numbers, in their order, into one 64-bit key."""
    key = 0
    for (
        part
    ) in parts:  # SplitMix64's output, in Python's own numbers: arrays of one would take 10 times as long
        state = (key + _GAMMA + part) & _MASK
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
        key = state ^ state >> 31
    return key


def words(key: int, counters: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return one 64-bit word for each counter under a key.

    Parameters
    ----------
    key : int
        From :func:`combine`.
    counters : (n,) int64

    Returns
    -------
    (n,) uint64
    """
    return split_mix(counters.astype(np.uint64) * GOLDEN_GAMMA + np.uint64(key))


def below(key: int, count: int, limit: int) -> npt.NDArray[np.int64]:
    """Draw whole numbers from [0, limit), uniformly.

    The upper 64 bits of the 128-bit product of a word and the limit (Lemire 2019). Probabilities of any two
    numbers differ by at most limit / 2**64 of themselves: 5e-11 at 10**9 entities.

    Parameters
    ----------
    key : int
    count, limit : int
        How many to draw, and below what: at most 2**63.

    Returns
    -------
    (count,) int64
    """
    drawn = words(key, np.arange(count, dtype=np.int64))
    # numpy has no product of 128 bits, so it is put together from products of halves, as on paper.
    half, low_bits = np.uint64(32), np.uint64((1 << 32) - 1)
    high, low = drawn >> half, drawn & low_bits
    limit_high, limit_low = np.uint64(limit >> 32), np.uint64(limit & int(low_bits))
    first, second = high * limit_low, low * limit_high
    carried = (low * limit_low >> half) + (first & low_bits) + (second & low_bits)
    return (high * limit_high + (first >> half) + (second >> half) + (carried >> half)).astype(np.int64)
