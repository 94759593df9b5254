"""Arrays of integers that are sorted, or grouped by a counting sort."""

from __future__ import annotations

from typing import Literal

import numpy as np


def is_first(*columns: np.ndarray) -> np.ndarray:
    """Return whether each row of sorted columns, (n,) each, is not equal to that before it, (n,) bool."""
    differs = np.zeros(len(columns[0]), bool)
    differs[:1] = True
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
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


def equal_pairs(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the places (n,) of all pairs of equal numbers of two arrays."""
    # Sort and search, O((L + R) log R), instead of a comparison of all pairs.
    order = np.argsort(right, kind="stable")
    ranked = right[order]
    first = np.searchsorted(ranked, left)
    rows, places = spans(first, np.searchsorted(ranked, left, side="right") - first)
    return rows, order[places]


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
