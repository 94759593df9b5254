"""Counter-based numbers: SplitMix64 in Python's integers, keys, and uniform draws."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.kernels.hashing import (
    GOLDEN_GAMMA,
    below,
    column_bits,
    combine,
    row_keys,
    split_mix,
    stream_key,
    words,
)

MASK = (1 << 64) - 1


def reference_split_mix(state: int) -> int:
    """Steele, Lea and Flood 2014, figure 16, in Python's integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_equals_reference() -> None:
    """The function, the stream of seed 0 as every implementation of SplitMix64 gives it, keys and words."""
    states = [0, 1, 12345, 2**63, MASK]
    assert split_mix(np.array(states, np.uint64)).tolist() == [reference_split_mix(state) for state in states]
    bits = column_bits(np.zeros(1, np.uint64), 3)
    assert bits.tolist() == [[0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]]
    key, gamma = stream_key(1, "person"), int(GOLDEN_GAMMA)
    keys = row_keys(key, np.array([0, 7]))
    assert keys.tolist() == [reference_split_mix((int(key[0]) + id_ * gamma) & MASK) for id_ in (0, 7)]
    assert int(column_bits(keys, 4)[1, 2]) == reference_split_mix((int(keys[1]) + 3 * gamma) & MASK)
    other = combine(7, -3, 2**63)
    counters = np.array([0, 1, 2, 12345, 2**40])
    states = [(counter * gamma + other) & MASK for counter in counters.tolist()]
    assert words(other, counters).tolist() == list(map(reference_split_mix, states))


def test_keys_differ_and_do_not_depend_on_the_kind_of_integer() -> None:
    """They depend on every part and on the order of the parts."""
    parts = [(1, "a"), (2, "a"), (1, "b"), (12, "a"), (1, "2a"), ("a", 1)]
    assert len({int(stream_key(*words)[0]) for words in parts}) == 6
    assert stream_key(np.int64(5), "a") == stream_key(5, "a")
    assert len({combine(*parts) for parts in [(1, 2), (2, 1), (1, 2, 0), (1,), (0, 1, 2), (1, 3)]}) == 6


def test_below_is_uniform_and_in_range() -> None:
    for limit in (1, 3, 1000, 2**31, 2**40):
        drawn = below(combine(limit), 20_000, limit)
        assert drawn.min() >= 0 and drawn.max() < limit
    counts = np.bincount(below(combine(9), 100_000, 50), minlength=50)
    assert ((counts - 2000) ** 2 / 2000).sum() < 49 + 5 * np.sqrt(2 * 49)


LIMITS = [1, 3, 50, 1000, 10**9, 3 * 2**29, 2**31 + 1, 3 * 2**30, 2**32 - 1, 2**32, 7 * 2**33 + 5, 2**63]


def test_below_is_the_upper_half_of_a_product() -> None:
    """Against Python's own integers."""
    for limit in LIMITS:
        key = combine(5, limit)
        drawn = words(key, np.arange(2000)).tolist()
        assert below(key, 2000, limit).tolist() == [word * limit >> 64 for word in drawn]


@pytest.mark.parametrize("limit", [10**9, 3 * 2**30])
def test_large_ranges_are_uniform(limit: int) -> None:
    """A method that spends 32 bits gives some numbers 5 of 2**32 words and others 4 at 10**9. Counted by this
    number of words, and by tenths of the range, the draws are as frequent as the numbers themselves."""
    num_draws = 400_000
    drawn = below(combine(11, limit), num_draws, limit)

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
