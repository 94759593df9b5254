"""Numbers that are functions of a key and a counter."""

from __future__ import annotations

import numpy as np

from dglkge.sampling import keyed_hash

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """SplitMix64's finalizer, written with Python's own integers."""
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_words_equal_splitmix64_in_plain_integers() -> None:
    key = keyed_hash.combine(7, -3, 2**63)
    counters = np.array([0, 1, 2, 12345, 2**40])
    expected = [splitmix64((counter * 0x9E3779B97F4A7C15 + key) & MASK) for counter in counters.tolist()]
    assert keyed_hash.words(key, counters).tolist() == expected


def test_keys_depend_on_every_part_and_on_their_order() -> None:
    keys = {keyed_hash.combine(*parts) for parts in [(1, 2), (2, 1), (1, 2, 0), (1,), (0, 1, 2), (1, 3)]}
    assert len(keys) == 6


def test_below_is_uniform_and_in_range() -> None:
    for limit in (1, 3, 1000, 2**31, 2**40):
        drawn = keyed_hash.below(keyed_hash.combine(limit), 20_000, limit)
        assert drawn.min() >= 0 and drawn.max() < limit
    counts = np.bincount(keyed_hash.below(keyed_hash.combine(9), 100_000, 50), minlength=50)
    assert ((counts - 2000) ** 2 / 2000).sum() < 49 + 5 * np.sqrt(2 * 49)
