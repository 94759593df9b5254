"""Core numbers against deleting nodes for every k."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.tuning.subgraph import core_numbers, core_shares, triple_cores

NUM_NODES = 9

edges = st.lists(st.tuples(st.integers(0, NUM_NODES - 1), st.integers(0, NUM_NODES - 1)), max_size=50)


def core_by_deletion(pairs, k) -> set[int]:
    """Delete one node after another with fewer than k ends of edges."""
    nodes = set(range(NUM_NODES))
    while True:
        ends = [end for a, b in pairs if a in nodes and b in nodes for end in (a, b)]
        weak = [node for node in nodes if ends.count(node) < k]
        if not weak:
            return nodes
        nodes.remove(weak[0])


@settings(max_examples=150, deadline=None)
@given(pairs=edges)
def test_equals_deletion(pairs):
    heads, tails = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    core = core_numbers(heads, tails, NUM_NODES)
    for k in range(int(core.max()) + 2):
        assert set(np.flatnonzero(core >= k).tolist()) == core_by_deletion(pairs, k)
    if pairs:
        cores = triple_cores(heads, tails, core)
        shares = core_shares(cores)
        assert len(shares) == cores.max() + 1 and shares[0] == 1
        for k, share in enumerate(shares.tolist()):
            nodes = core_by_deletion(pairs, k)
            assert share == sum(a in nodes and b in nodes for a, b in pairs) / len(pairs)


def test_clique_with_a_tail():
    """Four nodes joined to each other have core number 3, a path from them 1, a node alone 0."""
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (3, 4), (4, 5)]
    heads, tails = np.array(pairs).T
    assert core_numbers(heads, tails, 7).tolist() == [3, 3, 3, 3, 1, 1, 0]
