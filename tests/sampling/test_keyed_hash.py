"""Numbers that are functions of a key and a counter."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.kernels import hashing as keyed_hash

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


LIMITS = [1, 3, 50, 1000, 10**9, 3 * 2**29, 2**31 + 1, 3 * 2**30, 2**32 - 1, 2**32, 7 * 2**33 + 5, 2**63]


@pytest.mark.parametrize("limit", LIMITS)
def test_below_is_the_upper_half_of_a_product(limit: int) -> None:
    """Against Python's own integers."""
    key = keyed_hash.combine(5, limit)
    drawn = keyed_hash.words(key, np.arange(2000)).tolist()
    assert keyed_hash.below(key, 2000, limit).tolist() == [word * limit >> 64 for word in drawn]


@pytest.mark.parametrize("limit", [10**9, 3 * 2**29, 2**31 - 1, 3 * 2**30])
def test_large_ranges_are_uniform(limit: int) -> None:
    """A method that spends 32 bits gives some numbers 5 of 2**32 words and others 4 at 10**9. Counted by this
    number of words, and by tenths of the range, the draws are as frequent as the numbers themselves."""
    num_draws = 400_000
    drawn = keyed_hash.below(keyed_hash.combine(11, limit), num_draws, limit)

    def num_words(values: np.ndarray) -> np.ndarray:
        """How many 32-bit words a number gets: the multiples of 1 / 2**32 in its share of [0, 1)."""
        exact = values.astype(object)
        return np.array([-((-(v + 1) << 32) // limit) + ((-v << 32) // limit) for v in exact], np.int64)

    least = 2**32 // limit
    expected_more = (2**32 - least * limit) / limit  # share of the numbers that get one word more
    share_more = (num_words(drawn) > least).mean()
    deviation = np.sqrt(expected_more * (1 - expected_more) / num_draws)
    assert abs(share_more - expected_more) < 5 * deviation
    counts = np.bincount(drawn * 10 // limit, minlength=10)
    assert ((counts - num_draws / 10) ** 2 / (num_draws / 10)).sum() < 9 + 5 * np.sqrt(2 * 9)
