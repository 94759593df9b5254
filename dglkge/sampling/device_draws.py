"""Order and negatives on a device: the numbers of :mod:`dglkge.kernels.hashing`, by torch's operations.

Numbers of 64 bits without a sign are kept in int64: sums and products wrap around alike, and shifts are made
logical ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dglkge.kernels.hashing import GOLDEN_GAMMA


def signed(word: int) -> int:
    """Return 64 bits without a sign as the number that int64 has for them."""
    return word - (1 << 64) if word >> 63 else word


_GAMMA, _FIRST, _SECOND = map(signed, (int(GOLDEN_GAMMA), 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_HALF, _LOW_BITS = 32, (1 << 32) - 1


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift words to the right and fill up with zeros."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def split_mix(states: Tensor) -> Tensor:
    """Return SplitMix64's output for each state; see :func:`dglkge.kernels.hashing.split_mix`."""
    states = (states ^ _shifted(states, 30)) * _FIRST
    states = (states ^ _shifted(states, 27)) * _SECOND
    return states ^ _shifted(states, 31)


def extended(keys: Tensor, part: Tensor | int) -> Tensor:
    """Return keys after one more whole number; see :func:`dglkge.kernels.hashing.combine`."""
    return split_mix(keys + _GAMMA + part)


def below(keys: Tensor, count: int, limit: int) -> Tensor:
    """Draw numbers (C, count) from [0, limit) by keys (C,); see :func:`dglkge.kernels.hashing.below`."""
    counters = torch.arange(count, device=keys.device) * _GAMMA
    bits = split_mix(counters + keys[:, None])
    high, low = _shifted(bits, _HALF), bits & _LOW_BITS
    limit_high, limit_low = limit >> _HALF, limit & _LOW_BITS
    first, second = high * limit_low, low * limit_high
    carried = _shifted(low * limit_low, _HALF) + (first & _LOW_BITS) + (second & _LOW_BITS)
    return high * limit_high + _shifted(first, _HALF) + _shifted(second, _HALF) + _shifted(carried, _HALF)


def inverse_walk(values: Tensor, num: int, a: int, b: int, keys: list[int]) -> Tensor:
    """Return the inverse permutation of values; see :func:`dglkge.kernels.hashing.walk_all`."""
    left, right = values % a, values // a
    for number in reversed(range(len(keys))):
        key = signed(keys[number])
        if number % 2 == 0:
            left = (left + a - _draw(key, right, a)) % a
        else:
            right = (right + b - _draw(key, left, b)) % b
    walked = right * a + left
    is_outside = walked >= num
    if is_outside.any():
        # Cycle walking, as there: seldom more than a few values.
        walked[is_outside] = inverse_walk(walked[is_outside], num, a, b, keys)
    return walked


def _draw(key: int, values: Tensor, limit: int) -> Tensor:
    return _shifted(split_mix(values * _GAMMA + key), 1) % limit
