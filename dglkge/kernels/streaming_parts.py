"""Greedy streaming partitioning: lists of neighbours, and a pass over the nodes."""

from __future__ import annotations

import numpy as np

from dglkge.kernels.jit import compiled


@compiled
def neighbour_lists(heads: np.ndarray, tails: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the neighbours of all nodes, node after node, each edge at both of its ends.

    Parameters
    ----------
    heads, tails : np.ndarray
        "(m,)" integers.
    starts : np.ndarray
        "(n + 1,) int64": those of node i are ``found[starts[i] : starts[i + 1]]``.
    """
    found = np.empty(2 * heads.shape[0], heads.dtype)
    next_place = starts[:-1].copy()
    for i in range(heads.shape[0]):
        head, tail = heads[i], tails[i]
        found[next_place[head]] = tail
        next_place[head] += 1
        found[next_place[tail]] = head
        next_place[tail] += 1
    return found


@compiled
def place_greedily(
    order: np.ndarray,
    starts: np.ndarray,
    neighbours: np.ndarray,
    in_degrees: np.ndarray,
    room: np.ndarray,
    loads: np.ndarray,
    parts: np.ndarray,
) -> None:
    """Place every node into the partition with most of its neighbours, weighted by the room there.

    The weight is the smaller free share of nodes and of edges. Among equals the least loaded partition wins,
    then the first; so it does if none has room.

    Parameters
    ----------
    order : np.ndarray
        "(n,) int64" nodes in the order in which they arrive.
    starts, neighbours : np.ndarray
        As of :func:`neighbour_lists`.
    in_degrees : np.ndarray
        "(n,) int64".
    room : np.ndarray
        "(2,) float64": most nodes, and most edges, of a partition.
    loads : np.ndarray
        "(2, P) int64" nodes and edges of each partition, changed.
    parts : np.ndarray
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
