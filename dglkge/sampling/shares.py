"""Shares of the kinds of negatives, in a module of its own: a plan checks them without DGL."""

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
    # Rounding errors: 100 * 0.29 is 28.999999999999996, which means 29.
    counts = [math.floor(value + 1e-6) for value in exact]
    # Largest remainder first; sorted() is stable, so ties go to the earlier kind on every process.
    by_remainder = sorted(range(len(shares)), key=lambda place: counts[place] - exact[place])
    for place in by_remainder[: num_negatives - sum(counts)]:
        counts[place] += 1
    return counts
