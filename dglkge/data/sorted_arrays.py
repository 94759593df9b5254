"""Arrays of integers that are sorted, or grouped by a counting sort."""

from __future__ import annotations

from typing import Literal

import numpy as np


def is_first(values: np.ndarray) -> np.ndarray:
    """Return whether each number of an ascending array is not that before it, (n,) bool."""
    differs = np.ones(len(values), bool)
    differs[1:] = values[1:] != values[:-1]
    return differs


def sorted_distinct(values: np.ndarray, kind: Literal["stable"] | None = None) -> np.ndarray:
    """Return the distinct numbers of an array in ascending order; ``"stable"`` merges ascending runs."""
    # numpy.unique without its further results hashes since numpy 2.3: 20 times as slow on random 64-bit keys.
    values = np.sort(values, kind=kind)
    return values[is_first(values)]


def find_sorted(values: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the place (n,) of each number in an ascending array, and whether it is there."""
    if len(values) == 0:
        return np.zeros(len(numbers), dtype=np.int64), np.zeros(len(numbers), dtype=bool)
    places = np.minimum(np.searchsorted(values, numbers), len(values) - 1)
    return places, values[places] == numbers


def contains(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return whether each number is in an ascending array, (n,) bool."""
    return find_sorted(values, numbers)[1]


def spans(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the places first, first + 1, ... of each row (n,), one row after another, as two (M,) int64.

    The first array has the row of each place, the second the places.
    """
    rows = np.repeat(np.arange(len(count), dtype=np.int64), count)
    return rows, np.arange(len(rows)) + np.repeat(first - (np.cumsum(count) - count), count)


def place_by_group(groups: np.ndarray, free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the order (n,) of rows by group, and the place (n,) of each in this order.

    ``free`` (G,) has the next free place of each group, and is moved on. In a group rows keep their order.
    """
    counts = np.bincount(groups, minlength=len(free))
    places = np.arange(len(groups)) + np.repeat(free - (np.cumsum(counts) - counts), counts)
    free += counts
    return np.argsort(groups, kind="stable"), places
