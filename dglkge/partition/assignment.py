"""Decides which partition owns each node where METIS does not, with nodes and edges balanced. No DGL."""

from __future__ import annotations

import numpy as np


def random_parts(
    type_of: np.ndarray, in_degrees: np.ndarray, num_parts: int, rng: np.random.Generator
) -> np.ndarray:
    """Deal nodes out at random, but so that all own equally many nodes of each type, and edges.

    The nodes are shuffled and ordered by in-degree (an edge belongs to its tail's partition); each goes to
    the partition that has the fewest edges so far among those with room for its type. So a partition with a
    node that very many edges point to gets no other large ones.

    Parameters
    ----------
    type_of : (n,) int64
        Type of each node, from 0.
    in_degrees : (n,) int64
        How many edges come with each node.
    num_parts : int
        Number of partitions.
    rng : numpy Generator
        Source of randomness.

    Returns
    -------
    (n,) int64
    """
    order = rng.permutation(len(in_degrees))
    order = order[np.argsort(-in_degrees[order], kind="stable")]
    parts_with_room, room = [], []
    for count in np.bincount(type_of).tolist():
        smallest, larger = divmod(count, num_parts)
        # which partitions take one node more is drawn, so that they are not the same for every type
        extra = rng.permutation(num_parts) < larger
        room.append([smallest + int(one) for one in extra])
        parts_with_room.append([part for part in range(num_parts) if room[-1][part]])
    load = [0] * num_parts
    parts = np.empty(len(in_degrees), dtype=np.int64)
    for node, type_, degree in zip(order.tolist(), type_of[order].tolist(), in_degrees[order].tolist()):
        part = min(parts_with_room[type_], key=load.__getitem__)
        parts[node] = part
        load[part] += degree
        room[type_][part] -= 1
        if room[type_][part] == 0:
            parts_with_room[type_].remove(part)
    return parts


def fill_empty_parts(
    parts: np.ndarray, type_of: np.ndarray, in_degrees: np.ndarray, num_parts: int
) -> np.ndarray:
    """Give every partition at least one node of every type.

    METIS may leave a partition without any node of a rare type, and DGL cannot store such a partition.

    Parameters
    ----------
    parts : (n,) int64
        Partition of each node.
    type_of : (n,) int64
        Type of each node, from 0; no type has fewer than ``num_parts`` nodes.
    in_degrees : (n,) int64
        How many edges come with each node.
    num_parts : int
        Number of partitions.

    Returns
    -------
    (n,) int64
        A copy in which a partition that lacked a type got the node with the fewest edges of the partition
        that has most of that type.
    """
    parts = parts.copy()
    for type_ in range(int(type_of.max()) + 1):
        nodes = np.flatnonzero(type_of == type_)
        counts = np.bincount(parts[nodes], minlength=num_parts)
        for part in np.flatnonzero(counts == 0):
            largest = int(counts.argmax())
            members = nodes[parts[nodes] == largest]
            parts[members[in_degrees[members].argmin()]] = part
            counts[largest] -= 1
            counts[part] += 1
    return parts
