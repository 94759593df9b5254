"""Passes over triples: new numbers, repeated pairs, degrees, components, partitioning, rows of ids."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from dglkge.kernels.hashing import mix_word
from dglkge.kernels.jit import compiled


@compiled
def _pair_place(head: int, tail: int, mask: np.uint64) -> np.uint64:
    lower, upper = np.uint64(min(head, tail)), np.uint64(max(head, tail))
    return mix_word(lower << np.uint64(32) | upper) & mask


@compiled
def count_pairs(heads: ndarray, tails: ndarray, first: int, end: int, counters: ndarray) -> None:
    """Count triples by a hash of their pair of entities, in either direction, up to 2, in two bits of
    ``counters``.

    A call counts in the bytes from ``first`` to ``end``: threads have ranges of their own.
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
def occurs_again(heads: ndarray, tails: ndarray, counters: ndarray) -> ndarray:
    """Return whether another triple has the pair of entities of each, or its hash; "(n,) bool"."""
    mask = np.uint64(4 * counters.shape[0] - 1)
    occurs = np.empty(heads.shape[0], np.bool_)
    for i in range(heads.shape[0]):
        place = _pair_place(heads[i], tails[i], mask)
        shift = np.uint8(2 * (place & np.uint64(3)))
        occurs[i] = (counters[np.int64(place >> np.uint64(2))] >> shift) & 3 >= 2
    return occurs


@compiled
def count_and_join(heads: ndarray, tails: ndarray, degrees: ndarray, parents: ndarray) -> None:
    """Count the triples of each entity in ``degrees``, and join the components of heads and tails.

    ``parents`` "(num_entities,) int32" is each entity's parent in a forest, a root's being itself. At first
    every entity is a root.
    """
    for i in range(heads.shape[0]):
        head_root, tail_root = heads[i], tails[i]
        degrees[heads[i]] += 1
        degrees[tails[i]] += 1
        while parents[head_root] != head_root:
            parents[head_root] = parents[parents[head_root]]
            head_root = np.int64(parents[head_root])
        while parents[tail_root] != tail_root:
            parents[tail_root] = parents[parents[tail_root]]
            tail_root = np.int64(parents[tail_root])
        # The smaller number is the root: paths stay short by their halving alone.
        if head_root < tail_root:
            parents[tail_root] = head_root
        else:
            parents[head_root] = tail_root


@compiled
def find_roots(parents: ndarray) -> None:
    """Make every entity's parent the root of its component; roots are the smallest of theirs."""
    for i in range(parents.shape[0]):
        # A parent has a smaller number, so it is done.
        parents[i] = parents[parents[i]]


@compiled
def count_values(values: ndarray, counts: ndarray) -> None:
    """Add to the count of each value, "(num,) int64"; the values "(n,)" are numbers from 0."""
    for i in range(values.shape[0]):
        counts[values[i]] += 1


@compiled
def mapped(triples: ndarray, heads: ndarray, relations: ndarray, tails: ndarray, out: ndarray) -> None:
    """Look up heads, relations and tails of triples "(n, 3)", each in a map of its own; ``out`` may be the
    triples themselves.
    """
    for i in range(triples.shape[0]):
        out[i, 0] = heads[triples[i, 0]]
        out[i, 1] = relations[triples[i, 1]]
        out[i, 2] = tails[triples[i, 2]]


@compiled
def spread(order: ndarray, types: ndarray, weights: ndarray, room: ndarray, parts: ndarray) -> None:
    """Give each node, in an order, to the partition with the least weight that has room for its type.

    Types and weights are "(n,)" of each node; ``room`` "(num_types, P)" is changed, ``parts`` "(n,)" written.
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


@compiled
def neighbour_lists(heads: ndarray, tails: ndarray, starts: ndarray) -> ndarray:
    """Return the neighbours of all nodes, node after node, each edge at both of its ends.

    Those of node i are ``neighbours[starts[i] : starts[i + 1]]``.
    """
    neighbours = np.empty(2 * heads.shape[0], heads.dtype)
    next_place = starts[:-1].copy()
    for i in range(heads.shape[0]):
        head, tail = heads[i], tails[i]
        neighbours[next_place[head]] = tail
        next_place[head] += 1
        neighbours[next_place[tail]] = head
        next_place[tail] += 1
    return neighbours


@compiled
def place_greedily(
    order: ndarray, starts: ndarray, neighbours: ndarray, in_degrees: ndarray,
    room: ndarray, loads: ndarray, parts: ndarray,
) -> None:  # fmt: skip
    """Place every node into the partition with most of its neighbours, weighted by the room there.

    The weight is the smaller free share of nodes and of edges. Among equals the least loaded partition wins,
    then the first; so it does if none has room.

    Parameters
    ----------
    order : ndarray
        "(n,) int64" nodes in the order in which they arrive.
    starts, neighbours : ndarray
        As of :func:`neighbour_lists`.
    room : ndarray
        "(2,) float64": most nodes, and most edges, of a partition.
    loads : ndarray
        "(2, P) int64" nodes and edges of each partition, changed.
    parts : ndarray
        "(n,) int64" partition of each node, -1 before it is placed; changed.
    """
    num_parts = loads.shape[1]
    counts = np.zeros(num_parts, np.int64)
    for node in order:
        counts[:] = 0
        for place in range(starts[node], starts[node + 1]):
            part = parts[neighbours[place]]
            # A loop does not draw its node to where it is.
            if part >= 0 and neighbours[place] != node:
                counts[part] += 1
        if parts[node] >= 0:
            loads[0, parts[node]] -= 1
            loads[1, parts[node]] -= in_degrees[node]
        best, best_score, best_load = -1, -1.0, 0.0
        for part in range(num_parts):
            load = max((loads[0, part] + 1) / room[0], (loads[1, part] + in_degrees[node]) / room[1])
            score = counts[part] * max(1.0 - load, 0.0)
            if score > best_score or (score == best_score and load < best_load):
                best, best_score, best_load = part, score, load
        parts[node] = best
        loads[0, best] += 1
        loads[1, best] += in_degrees[node]


@compiled
def find_rows(ids: ndarray, triple_ids: ndarray, starts: ndarray, shift: int, rows: ndarray) -> None:
    """Write the row of each of some ids "(n,) int64" among sorted ids "(N,)", -1 for those that are absent.

    ``starts`` holds the first row of each bucket, of ids with the same ``id >> shift``, and N.
    """
    last = starts.shape[0] - 2
    for i in range(ids.shape[0]):
        rows[i] = -1
        bucket = ids[i] >> shift
        if bucket > last:
            continue
        # Binary search (lower bound) inside the bucket.
        low, high = starts[bucket], starts[bucket + 1]
        while low < high:
            middle = (low + high) // 2
            if triple_ids[middle] < ids[i]:
                low = middle + 1
            else:
                high = middle
        if low < starts[bucket + 1] and triple_ids[low] == ids[i]:
            rows[i] = low
