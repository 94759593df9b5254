"""Uniform negatives: keyed, of the right type, the same for every partitioning."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dglkge.sampling.negatives import UniformNegatives, find_equal

random = np.random.default_rng(1)
NODE_IDS = {"person": random.permutation(500), "place": random.permutation(30)}


def test_negatives_depend_on_their_whole_key() -> None:
    sampler = UniformNegatives(64, NODE_IDS, seed=3)
    keys = [("person", 0, 0, 0), ("person", 1, 0, 0), ("person", 0, 1, 0), ("person", 0, 0, 1)]
    drawn = {tuple(sampler.sample(*key)) for key in keys}
    assert len(drawn) == 4
    assert tuple(sampler.sample(*keys[0])) in drawn
    assert tuple(UniformNegatives(64, NODE_IDS, seed=4).sample(*keys[0])) not in drawn


def test_another_partitioning_draws_the_same_entities() -> None:
    other = {name: np.roll(ids, 7) for name, ids in NODE_IDS.items()}
    for entity_type in NODE_IDS:
        here = UniformNegatives(200, NODE_IDS, seed=3).sample(entity_type, 2, 5, 1)
        there = UniformNegatives(200, other, seed=3).sample(entity_type, 2, 5, 1)
        original_here = np.argsort(NODE_IDS[entity_type])[here]
        original_there = np.argsort(other[entity_type])[there]
        assert (original_here == original_there).all()


def test_every_entity_is_drawn_equally_often() -> None:
    sampler = UniformNegatives(1000, NODE_IDS, seed=0)
    drawn = np.concatenate([sampler.sample("place", 0, batch, 0) for batch in range(60)])
    counts = np.bincount(drawn, minlength=30)
    assert len(counts) == 30
    assert ((counts - 2000) ** 2 / 2000).sum() < 29 + 5 * np.sqrt(2 * 29)


@given(
    ids=st.lists(st.integers(0, 12), max_size=20),
    negatives=st.lists(st.integers(0, 12), min_size=1, max_size=20),
)
def test_find_equal_finds_what_looking_at_every_pair_finds(ids: list[int], negatives: list[int]) -> None:
    rows, columns = find_equal(np.array(ids, np.int64), np.array(negatives, np.int64))
    expected = {(i, j) for i, a in enumerate(ids) for j, b in enumerate(negatives) if a == b}
    assert len(rows) == len(expected)
    assert set(zip(rows.tolist(), columns.tolist())) == expected
