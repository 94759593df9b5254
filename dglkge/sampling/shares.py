"""Shares of the kinds of negatives. Apart from the negatives, so that a plan can check them without DGL."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dglkge.errors import InputError


def split_count(num_negatives: int, shares: Sequence[float]) -> list[int]:
    """Split a number of negatives by shares that sum to 1, by largest remainders (Hamilton's method).

    Raises
    ------
    InputError
        If a share is negative or the sum is not 1.

    Examples
    --------
    >>> split_count(10, (0.25, 0.5, 0.25))
    [3, 5, 2]
    """
    if min(shares) < 0 or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise InputError(
            f"the shares of negatives {tuple(shares)} are not allowed: global_share, local_share and "
            "in_batch_share are at least 0 and sum to 1"
        )
    exact = [num_negatives * share for share in shares]
    counts = [math.floor(value + 1e-6) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda place: counts[place] - exact[place])
    for place in by_remainder[: num_negatives - sum(counts)]:
        counts[place] += 1
    return counts
