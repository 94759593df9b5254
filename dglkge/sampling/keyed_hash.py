"""Pseudo-random numbers that are functions of a key and a counter: any process computes any of them alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dglkge.model.counter_random import GOLDEN_GAMMA, in_range, mix_word, split_mix

_MASK = (1 << 64) - 1


def combine(*parts: int) -> int:
    """Hash whole numbers, in their order, into one 64-bit key."""
    key = np.uint64(0)
    for part in parts:
        key = mix_word(np.uint64((int(key) + int(GOLDEN_GAMMA) + part) & _MASK))
    return int(key)


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
