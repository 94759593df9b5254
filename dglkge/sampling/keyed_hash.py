"""Pseudo-random numbers that are functions of a key and a counter: any process computes any of them alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dglkge.model.counter_random import GOLDEN_GAMMA, in_range, split_mix

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
    """Draw whole numbers from [0, limit), uniformly: see :func:`in_range`.

    Parameters
    ----------
    key : int
    count, limit : int

    Returns
    -------
    (count,) int64
    """
    return in_range(words(key, np.arange(count, dtype=np.int64)), limit)
