"""Passes over triples: new numbers, pairs of entities that occur again, degrees and components."""

from __future__ import annotations

import numpy as np

from dglkge.kernels.hashing import mix_word
from dglkge.kernels.jit import compiled


@compiled
def renumber(triples: np.ndarray, entities: np.ndarray, relations: np.ndarray) -> None:
    """Replace the ids of triples.

    Parameters
    ----------
    triples : np.ndarray
        "(n, 3)" heads, relations and tails, changed.
    entities, relations : np.ndarray
        The new id of each.
    """
    for i in range(triples.shape[0]):
        triples[i, 0] = entities[triples[i, 0]]
        triples[i, 1] = relations[triples[i, 1]]
        triples[i, 2] = entities[triples[i, 2]]


@compiled
def _pair_place(head: int, tail: int, mask: np.uint64) -> np.uint64:
    lower, upper = np.uint64(min(head, tail)), np.uint64(max(head, tail))
    return mix_word(lower << np.uint64(32) | upper) & mask


@compiled
def count_pairs(heads: np.ndarray, tails: np.ndarray, first: int, end: int, counters: np.ndarray) -> None:
    """Count triples by a hash of their pair of entities, in either direction, up to 2.

    Parameters
    ----------
    heads, tails : np.ndarray
        "(n,) int64".
    first, end : int
        Bytes of the counters that this call counts in: threads have ranges of their own.
    counters : np.ndarray
        "(2 ** k,) uint8": four counters each, changed.
    """
    mask = np.uint64(4 * counters.shape[0] - 1)
    for i in range(heads.shape[0]):
        place = _pair_place(heads[i], tails[i], mask)
        byte = np.int64(place >> np.uint64(2))
        if first <= byte and byte < end:
            shift = np.uint8(2 * (place & np.uint64(3)))
            if (counters[byte] >> shift) & 3 < 2:
                counters[byte] += np.uint8(1) << shift


@compiled
def occurs_again(heads: np.ndarray, tails: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return whether another triple has the pair of entities of each, or its hash; "(n,) bool"."""
    mask = np.uint64(4 * counters.shape[0] - 1)
    found = np.empty(heads.shape[0], np.bool_)
    for i in range(heads.shape[0]):
        place = _pair_place(heads[i], tails[i], mask)
        shift = np.uint8(2 * (place & np.uint64(3)))
        found[i] = (counters[np.int64(place >> np.uint64(2))] >> shift) & 3 >= 2
    return found


@compiled
def count_and_join(heads: np.ndarray, tails: np.ndarray, degrees: np.ndarray, parents: np.ndarray) -> None:
    """Count the triples of each entity, and join the components of heads and tails.

    Parameters
    ----------
    heads, tails : np.ndarray
        "(n,) int64".
    degrees : np.ndarray
        "(num_entities,) int64", changed.
    parents : np.ndarray
        "(num_entities,) int32", changed: each entity's parent in a forest, a root's being itself. At first
        every entity is a root.
    """
    for i in range(heads.shape[0]):
        one, other = heads[i], tails[i]
        degrees[one] += 1
        degrees[other] += 1
        while parents[one] != one:
            parents[one] = parents[parents[one]]
            one = np.int64(parents[one])
        while parents[other] != other:
            parents[other] = parents[parents[other]]
            other = np.int64(parents[other])
        # The smaller number is the root: paths stay short by their halving alone.
        if one < other:
            parents[other] = one
        else:
            parents[one] = other


@compiled
def find_roots(parents: np.ndarray) -> None:
    """Make every entity's parent the root of its component; roots are the smallest of theirs."""
    for i in range(parents.shape[0]):
        # A parent has a smaller number, so it is done.
        parents[i] = parents[parents[i]]


@compiled
def count_values(values: np.ndarray, counts: np.ndarray) -> None:
    """Add to the count of each value, "(num,) int64"; the values "(n,)" are numbers from 0."""
    for i in range(values.shape[0]):
        counts[values[i]] += 1


@compiled
def mapped(
    triples: np.ndarray, heads: np.ndarray, relations: np.ndarray, tails: np.ndarray, found: np.ndarray
) -> None:
    """Look up each part of triples in a map of its own.

    Parameters
    ----------
    triples : np.ndarray
        "(n, 3)" integers.
    heads, relations, tails : np.ndarray
        The new number of each old one.
    found : np.ndarray
        "(n, 3)", written.
    """
    for i in range(triples.shape[0]):
        found[i, 0] = heads[triples[i, 0]]
        found[i, 1] = relations[triples[i, 1]]
        found[i, 2] = tails[triples[i, 2]]


@compiled
def spread(
    order: np.ndarray, types: np.ndarray, weights: np.ndarray, room: np.ndarray, parts: np.ndarray
) -> None:
    """Give each node, in an order, to the partition with the least weight that has room for its type.

    Parameters
    ----------
    order : np.ndarray
        "(n,) int64" nodes.
    types, weights : np.ndarray
        "(n,) int64" of each node.
    room : np.ndarray
        "(num_types, P) int64": nodes of each type that a partition still takes, changed.
    parts : np.ndarray
        "(n,) int64" partition of each node, written.
    """
    num_parts = room.shape[1]
    loads = np.zeros(num_parts, np.int64)
    for node in order:
        best = -1
        for part in range(num_parts):
            if room[types[node], part] > 0 and (best < 0 or loads[part] < loads[best]):
                best = part
        parts[node] = best
        loads[best] += weights[node]
        room[types[node], best] -= 1
