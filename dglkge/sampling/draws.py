"""Draws of negatives: counts of each kind by shares, and entities in proportion to a power of their degrees.

Mikolov et al. 2013 take the power 3/4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dglkge.errors import InputError
from dglkge.kernels.hashing import below


def split_count(num_negatives: int, shares: Sequence[float]) -> list[int]:
    """Split a number of negatives by shares that sum to 1, by largest remainders (Hamilton's method).

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


Ids = npt.NDArray[np.int64]

TOTAL_BITS = 52
"""The weights of an entity type sum to about 2**52: their sums fit into int64."""

TRIPLES_A_BLOCK = 1 << 20
"""Triples that are counted at a time, or as many as there are entities."""


def count_degrees(
    triples: npt.NDArray[np.integer], types: Sequence[tuple[str, str]], num_entities: Mapping[str, int]
) -> dict[str, Ids]:
    """Count the triples (T, 3) of each entity, as head and as tail; by original ids (n,) of each type.

    ``types`` are those of the heads and tails of each relation.

    Examples
    --------
    >>> count_degrees(np.array([[0, 0, 1], [2, 0, 1]]), [("word", "word")], {"word": 4})
    {'word': array([1, 2, 1, 0])}
    """
    degrees = {name: np.zeros(num, np.int64) for name, num in num_entities.items()}
    number = {name: i for i, name in enumerate(num_entities)}
    type_of = np.array([[number[lhs], number[rhs]] for lhs, rhs in types], np.int64).reshape(-1, 2)
    # Each count makes an array of all entities: blocks of fewer triples would take longer.
    block = max(TRIPLES_A_BLOCK, *num_entities.values())
    for start in range(0, len(triples), block):
        heads, relations, tails = np.asarray(triples[start : start + block]).T
        for side, entities in enumerate((heads, tails)):
            types_here = type_of[relations, side]
            for name, i in number.items():
                of_type = entities if len(number) == 1 else entities[types_here == i]
                degrees[name] += np.bincount(of_type, minlength=num_entities[name])
    return degrees


def degree_weights(degrees: Ids, power: float) -> Ids:
    """Return whole numbers (n,) in proportion to degree ** power; 0 for entities without triples.

    Real numbers with a mean of about 2**52 / n, rounded, at least 1. Whole numbers make sums exact, so all
    machines draw the same.
    """
    powers = np.zeros(len(degrees))
    drawn = degrees > 0
    if not drawn.any():
        return powers.astype(np.int64)
    # Relative to the greatest degree: the power of a degree alone may overflow.
    powers[drawn] = (degrees[drawn] / degrees.max()) ** power
    # A power of two: the last bits of the sum, which machines may add in another order, do not reach weights.
    scale = 2.0 ** math.floor(TOTAL_BITS - math.log2(powers.sum()))
    return np.where(drawn, np.maximum(np.rint(powers * scale), 1), 0).astype(np.int64)


class WeightedDraw:
    """Draws numbers in proportion to weights, exactly: the inverse of their cumulative distribution.

    Parameters
    ----------
    weights : (n,) int64
        At least 0, with a positive sum below 2**63.

    Examples
    --------
    >>> set(WeightedDraw(np.array([0, 3, 0, 1])).draw(7, 100).tolist())
    {1, 3}
    """

    def __init__(self, weights: Ids) -> None:
        self._ends = np.cumsum(weights)

    def draw(self, key: int, count: int) -> Ids:
        """Return numbers (count,) in [0, n) under a key; see :func:`dglkge.kernels.hashing.below`."""
        places = below(key, count, int(self._ends[-1]))
        # Number i owns the places [ends[i - 1], ends[i]); numbers of weight 0 own none.
        return np.searchsorted(self._ends, places, side="right").astype(np.int64)
