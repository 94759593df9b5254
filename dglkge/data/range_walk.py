"""Walks over the pairs of ranges of rows, as pure functions, and the loads of ranges that a walk costs.

The rows of each entity type on a machine are cut into P ranges. A bucket is a pair (range of the heads, range
of the tails), as in PyTorch-BigGraph (Lerer et al. 2019, "PyTorch-BigGraph: A large-scale graph embedding
system"), and an epoch is a walk over the P * P buckets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np

from dglkge.errors import require_known
from dglkge.kernels.hashing import combine, words
from dglkge.typing import Ids

# Domain separation: the streams of the walk and of the order share the seed, not the key.
_WALK_KEY = 0xB0C4


def range_bounds(starts: Ids, num_ranges: int) -> Ids:
    """Cut the rows of each partition into nearly equal ranges.

    Parameters
    ----------
    starts : (num_parts + 1,) int64
        First node id of each partition and, last, the number of nodes.

    Returns
    -------
    (num_parts * num_ranges + 1,) int64
        First node id of each range, partition by partition, and, last, the number of nodes. Ranges are empty
        where a partition has fewer rows than ranges.

    Examples
    --------
    >>> range_bounds(np.array([0, 4, 7]), 2).tolist()
    [0, 2, 4, 5, 7]
    """
    steps = np.arange(num_ranges, dtype=np.int64)
    firsts = starts[:-1, None] + np.diff(starts)[:, None] * steps // num_ranges
    return np.append(firsts.ravel(), starts[-1]).astype(np.int64)


def ranges_of(node_ids: Ids, bounds: Ids, num_ranges: int) -> Ids:
    """Return the range (n,) of each node on its own machine, under the bounds of :func:`range_bounds`."""
    # side="right" skips empty ranges, which have two equal bounds.
    return np.searchsorted(bounds[1:], node_ids, side="right") % num_ranges


def walk_pairs(order: str, num_ranges: int, seed: int, epoch: int) -> Ids:
    """Return the pairs of an epoch in their order: (P * P, 2) int64, range of the heads and of the tails.

    Ranges are renamed by a keyed permutation in each epoch, so that no range is always the last one.

    Parameters
    ----------
    order : str
        * ``inside_out``: layers max(i, j) = 0, 1, 2, ...; in a layer both pairs of two ranges follow each
          other. With memory for two ranges of one entity type it costs 1 + P (P - 1) / 2 loads, the fewest
          that are possible.
        * ``outside_in``: the same backwards.
        * ``affinity``: the next pair is one of those that share the most ranges with the last, at random.
        * ``random``: a permutation.
        * ``hilbert``: the curve of Hilbert (1891) on the smallest square of a power of two, without the pairs
          outside.
    """
    require_known("sampling.bucket_order", order, WALKS)
    key = combine(_WALK_KEY, seed, epoch)
    names = np.argsort(words(combine(key, 0), np.arange(num_ranges, dtype=np.int64)), kind="stable")
    return names[np.array(WALKS[order](num_ranges, combine(key, 1)), np.int64).reshape(-1, 2)]


def unordered(walk: Ids) -> Ids:
    """Return the pairs of two different ranges, lower number first, in the order in which a walk meets them.

    They are P (P - 1) / 2; of a single range, the pair with itself.

    Examples
    --------
    >>> unordered(np.array([[0, 0], [1, 0], [0, 1], [1, 1]])).tolist()
    [[0, 1]]
    """
    if len(walk) == 1:
        return walk
    met = dict.fromkeys((min(pair), max(pair)) for pair in walk.tolist() if pair[0] != pair[1])
    return np.array(list(met), np.int64).reshape(-1, 2)


def _inside_out(num_ranges: int, key: int) -> list[tuple[int, int]]:
    """Return the layers from the inside; the new range of a layer meets those first that were used last."""
    walk = [(0, 0)]
    partners: list[int] = []
    for layer in range(1, num_ranges):
        # The range of the layer before is in memory and meets the new one first. The order of the others
        # turns from layer to layer, so that a larger memory finds them too.
        partners = [layer - 1, *reversed(partners)]
        pairs = [pair for other in partners for pair in ((layer, other), (other, layer))]
        walk += [*pairs[:2], (layer, layer), *pairs[2:]]
    return walk


def _affinity(num_ranges: int, key: int) -> list[tuple[int, int]]:
    """Follow the most shared ranges; ties by one keyed word for each step."""
    left = dict.fromkeys(divmod(place, num_ranges) for place in range(num_ranges**2))
    walk: list[tuple[int, int]] = []
    for draw in words(key, np.arange(num_ranges**2, dtype=np.int64)).tolist():
        near: list[tuple[int, int]] = []
        if walk:
            i, j = walk[-1]
            # Both ranges are there for these: nothing is loaded.
            near = [pair for pair in dict.fromkeys([(i, i), (i, j), (j, i), (j, j)]) if pair in left]
            if not near:
                lines = [(row, column) for row in (i, j) for column in range(num_ranges)]
                both = dict.fromkeys([*lines, *((tail, head) for head, tail in lines)])
                near = [pair for pair in both if pair in left]
        near = near or list(left)
        walk.append(near[draw % len(near)])
        del left[walk[-1]]
    return walk


def _random(num_ranges: int, key: int) -> list[tuple[int, int]]:
    order = np.argsort(words(key, np.arange(num_ranges**2, dtype=np.int64)), kind="stable")
    return [divmod(int(place), num_ranges) for place in order]


def _hilbert(num_ranges: int, key: int) -> list[tuple[int, int]]:
    """Walk along the curve of the smallest power of two."""
    curve = _hilbert_curve(1 << (num_ranges - 1).bit_length())
    return [(x, y) for x, y in curve if x < num_ranges and y < num_ranges]


def _hilbert_curve(size: int) -> list[tuple[int, int]]:
    """Return the cells of a square in the curve's order: four smaller curves, the lower ones mirrored."""
    if size == 1:
        return [(0, 0)]
    half = size // 2
    quarter = _hilbert_curve(half)
    upper = [(x + right, y + half) for right in (0, half) for x, y in quarter]
    return [(y, x) for x, y in quarter] + upper + [(size - 1 - y, half - 1 - x) for x, y in quarter]


WALKS: Mapping[str, Callable[[int, int], list[tuple[int, int]]]] = {
    "inside_out": _inside_out,
    "outside_in": lambda num_ranges, key: _inside_out(num_ranges, key)[::-1],
    "affinity": _affinity,
    "random": _random,
    "hilbert": _hilbert,
}
"""Walks over pairs of ranges by the names of ``sampling.bucket_order``."""


@dataclass(frozen=True)
class Loads:
    """Ranges that a walk loads into a limited memory; as many bytes are written, since each is trained."""

    count: int
    num_bytes: int


def count_loads(steps: Iterable[AbstractSet[Any]], sizes: Mapping[Any, int], capacity_bytes: int) -> Loads:
    """Count the loads of a walk from empty memory, where the least recently used range is dropped first.

    Each step needs a set of ranges, of any type with an order, at once; they are kept while it runs, also
    above the capacity.

    Examples
    --------
    >>> count_loads([{0}, {0, 1}, {2}, {0}], {0: 5, 1: 5, 2: 5}, 10)
    Loads(count=4, num_bytes=20)
    """
    held: OrderedDict[Any, int] = OrderedDict()
    used = count = num_bytes = 0
    for needed in steps:
        for range_ in sorted(needed):
            if range_ in held:
                held.move_to_end(range_)
            else:
                held[range_] = sizes[range_]
                used += sizes[range_]
                count += 1
                num_bytes += sizes[range_]
        # Needed ranges were just used: they are at the end, and the first ones are dropped.
        while used > capacity_bytes and len(held) > len(needed):
            used -= held.popitem(last=False)[1]
    return Loads(count, num_bytes)
