"""SplitMix64 against its published code, and keys that differ."""

from __future__ import annotations

import numpy as np

from dglkge.kernels.hashing import GOLDEN_GAMMA, column_bits, row_keys, split_mix, stream_key

MASK = (1 << 64) - 1


def reference_split_mix(state: int) -> int:
    """Steele, Lea and Flood 2014, figure 16, in Python's integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_equals_reference():
    states = [0, 1, 12345, 2**63, MASK]
    assert split_mix(np.array(states, np.uint64)).tolist() == [reference_split_mix(state) for state in states]


def test_known_first_outputs():
    """The stream of seed 0, as every implementation of SplitMix64 gives it."""
    bits = column_bits(np.zeros(1, np.uint64), 3)
    assert bits.tolist() == [[0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]]


def test_row_keys_and_columns_by_hand():
    key = stream_key(1, "person")
    keys = row_keys(key, np.array([0, 7]))
    gamma = int(GOLDEN_GAMMA)
    assert keys.tolist() == [reference_split_mix((int(key[0]) + id_ * gamma) & MASK) for id_ in (0, 7)]
    assert int(column_bits(keys, 4)[1, 2]) == reference_split_mix((int(keys[1]) + 3 * gamma) & MASK)


def test_keys_differ_and_do_not_depend_on_the_kind_of_integer():
    keys = {
        int(stream_key(*words)[0]) for words in [(1, "a"), (2, "a"), (1, "b"), (12, "a"), (1, "2a"), ("a", 1)]
    }
    assert len(keys) == 6
    assert stream_key(np.int64(5), "a") == stream_key(5, "a")
