"""Core numbers of entities: in the k-core, the largest such subgraph, every entity has at least k triples."""

from __future__ import annotations

import numpy as np


def core_numbers(heads: np.ndarray, tails: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return the core number of each node of a multigraph: the greatest k of the k-cores that have it.

    Nodes of the smallest degree are removed until none is left (Seidman 1983; Matula and Beck 1983). A triple
    counts once at each of its ends.

    Parameters
    ----------
    heads, tails : (n,) int64 array
        Ends of the edges.
    num_nodes : int
        N.

    Returns
    -------
    (N,) int64 array
    """
    degree = np.bincount(heads, minlength=num_nodes) + np.bincount(tails, minlength=num_nodes)
    core = np.zeros(num_nodes, dtype=np.int64)
    alive = degree > 0
    k = 0
    while alive.any():
        k = max(k, int(degree[alive].min()))
        # Removing one node may leave another with too few edges, so a level is repeated until it is stable.
        while (removed := alive & (degree <= k)).any():
            core[removed] = k
            alive &= ~removed
            kept = alive[heads] & alive[tails]
            degree -= np.bincount(heads[~kept], minlength=num_nodes)
            degree -= np.bincount(tails[~kept], minlength=num_nodes)
            heads, tails = heads[kept], tails[kept]
    return core


def triple_cores(heads: np.ndarray, tails: np.ndarray, core: np.ndarray) -> np.ndarray:
    """Return for each triple the greatest k of the k-cores that have both its ends, (n,) int64."""
    return np.minimum(core[heads], core[tails])


def core_shares(cores: np.ndarray) -> np.ndarray:
    """Return the share of the triples in the k-core for k = 0, 1, ... up to the densest one, float64.

    Parameters
    ----------
    cores : (n,) int64 array
        As :func:`triple_cores` returns them; at least one.
    """
    return np.cumsum(np.bincount(cores)[::-1])[::-1] / len(cores)
