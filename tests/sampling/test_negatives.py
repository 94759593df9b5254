"""Negatives: how many of each kind, from where, the same for whom; draws by degree; known answers."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from dglkge.data.known_triples import KnownTriples
from dglkge.data.sorted_arrays import equal_pairs
from dglkge.errors import InputError
from dglkge.sampling import negatives
from dglkge.sampling.edge_batches import EdgeBatch, EdgeGroup
from dglkge.sampling.negatives import AllNegatives, KnownAnswers, MixedNegatives, UniformNegatives
from dglkge.typing import RELATION, Side

random = np.random.default_rng(1)
NODE_IDS = {"person": random.permutation(500), "place": random.permutation(30), "day": np.arange(7)}
RANGES = {"person": (100, 300), "place": (10, 20), "day": (7, 7)}
PAIRS = [("person", "person"), ("person", "place"), ("place", "day")]
ONE_MACHINE = {name: (0, len(ids)) for name, ids in NODE_IDS.items()}


def a_batch(seed: int = 0, epoch: int = 0, index: int = 0) -> EdgeBatch:
    """Return two chunks: the first with the first two edge types, the second with the last."""
    drawn = np.random.default_rng(seed)
    groups = (EdgeGroup(0, 0, 0, 20), EdgeGroup(1, 0, 20, 30), EdgeGroup(2, 1, 30, 40))
    heads = np.concatenate([drawn.integers(0, 500, 30), drawn.integers(0, 30, 10)])
    tails = np.concatenate([drawn.integers(0, 500, 20), drawn.integers(0, 30, 10), drawn.integers(0, 7, 10)])
    nothing = np.zeros(40, np.int64)
    return EdgeBatch(epoch, index, 100, nothing, heads, nothing, tails, None, groups)


def expect_shares(drawn: np.ndarray, shares: np.ndarray) -> None:
    """Hold that numbers are drawn in proportion to their shares."""
    counts = np.bincount(drawn, minlength=len(shares))
    assert (counts[shares == 0] == 0).all()
    expected = len(drawn) * shares[shares > 0] / shares.sum()
    assert chisquare(counts[shares > 0], expected).pvalue > 1e-6


def sampler(shares: tuple[float, float, float], ranges=RANGES, number: int = 100) -> MixedNegatives:
    return MixedNegatives(number, shares, NODE_IDS, ranges, PAIRS, seed=3)


def test_global_negatives_are_uniform_and_so_are_all_on_one_machine_or_where_a_type_is_absent() -> None:
    uniform = UniformNegatives(100, NODE_IDS, seed=3)
    for name, chunk in (("person", 0), ("place", 1), ("day", 1)):
        expected = uniform.sample(name, 2, 5, chunk).tolist()
        kinds = [((1, 0, 0), RANGES), ((1, 0, 0), ONE_MACHINE), ((0.25, 0.75, 0), ONE_MACHINE)]
        for shares, ranges in kinds if name != "day" else [*kinds, ((0, 1, 0), RANGES)]:
            assert sampler(shares, ranges).sample(name, a_batch(0, 2, 5), chunk).tolist() == expected


def test_each_kind_comes_from_its_place_in_its_share() -> None:
    batch = a_batch()
    drawn = sampler((0.5, 0.3, 0.2)).sample("person", batch, 0)
    assert (drawn[:50] == UniformNegatives(50, NODE_IDS, seed=3).sample("person", 0, 0, 0)).all()
    assert ((drawn[50:80] >= 100) & (drawn[50:80] < 300)).all()
    assert len(set(drawn[50:80])) > 20
    assert set(drawn[80:]) <= {*batch.heads[:30], *batch.tails[:20]}
    assert set(sampler((0, 0, 1)).sample("place", batch, 0)) <= set(batch.tails[20:30])
    assert set(sampler((0, 0, 1)).sample("day", batch, 1)) <= set(batch.tails[30:])


def test_all_that_is_here_is_drawn_equally_often() -> None:
    batch = a_batch()
    present = np.concatenate([batch.heads[:30], batch.tails[:20]])
    for name, shares, num_copies in (
        ("place", (1, 0, 0), np.ones(30)),
        ("place", (0, 1, 0), np.repeat([0, 1, 0], 10)),
        ("person", (0, 0, 1), np.bincount(present, minlength=500)),
    ):
        uniform = sampler(shares, number=1000)
        drawn = np.concatenate([uniform.sample(name, a_batch(0, 0, index), 0) for index in range(60)])
        expect_shares(drawn, num_copies)


def test_draws_depend_on_their_whole_key_and_on_nothing_else() -> None:
    mixed = sampler((0, 0.5, 0.5))
    batches = [a_batch(0, *key) for key in ((0, 0), (1, 0), (0, 1))]
    drawn = {tuple(mixed.sample("person", batch, 0)) for batch in batches}
    keys = itertools.product((3, 4), (0, 1))
    uniform = {
        tuple(UniformNegatives(64, NODE_IDS, seed).sample("person", 0, 0, chunk)) for seed, chunk in keys
    }
    assert len(uniform) == 4
    assert len(drawn) == 3 and tuple(sampler((0, 0.5, 0.5)).sample("person", batches[0], 0)) in drawn
    elsewhere = sampler((0, 0.5, 0.5), {**RANGES, "person": (300, 500)}).sample("person", batches[0], 0)
    assert ((elsewhere[:50] >= 300) & (elsewhere[:50] < 500)).all()


@given(st.integers(1, 2000), st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any))
def test_counts_are_the_shares_to_within_one(number: int, weights: list[int]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    counts = negatives.split_count(number, shares)
    assert sum(counts) == number and min(counts) >= 0
    assert all(abs(count - number * share) < 1 + 1e-5 for count, share in zip(counts, shares))
    assert all(count == 0 for count, share in zip(counts, shares) if not share)


@pytest.mark.parametrize("shares", [(1, 0.5, 0), (0.5, 0, 0.4), (1.5, -0.5, 0)])
def test_shares_that_do_not_sum_to_one_are_refused(shares: tuple[float, float, float]) -> None:
    with pytest.raises(InputError, match="shares of negatives .* at least 0 and sum to 1"):
        sampler(shares)


def test_all_negatives_are_every_entity_of_the_type() -> None:
    all_entities = AllNegatives(100, (1.0, 0.0, 0.0), NODE_IDS, RANGES, PAIRS, seed=3)
    for name, chunk in (("person", 0), ("day", 1)):
        drawn = all_entities.sample(name, a_batch(), chunk)
        assert sorted(drawn) == list(range(len(NODE_IDS[name])))


@given(st.lists(st.integers(0, 12), max_size=20), st.lists(st.integers(0, 12), min_size=1, max_size=20))
def test_equal_pairs_are_what_looking_at_every_pair_finds(ids: list[int], others: list[int]) -> None:
    rows, columns = equal_pairs(np.array(ids, np.int64), np.array(others, np.int64))
    expected = {(i, j) for i, a in enumerate(ids) for j, b in enumerate(others) if a == b}
    assert len(rows) == len(expected)
    assert set(zip(rows.tolist(), columns.tolist())) == expected


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_degrees_are_counted_by_type(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negatives, "TRIPLES_A_BLOCK", block)
    num_entities = {"person": 50, "place": 9, "day": 3}
    limits = np.array([[num_entities[name] for name in pair] for pair in PAIRS])
    relations = random.integers(0, 3, 400)
    heads, tails = random.integers(0, limits[relations].T)
    triples, expected = np.stack([heads, relations, tails], axis=1), Counter()
    for head, relation, tail in triples.tolist():
        expected.update(zip(PAIRS[relation], (head, tail)))
    degrees = negatives.count_degrees(triples, PAIRS, num_entities)
    for name, num in num_entities.items():
        assert degrees[name].tolist() == [expected[name, entity] for entity in range(num)]
    degrees = negatives.count_degrees(triples[:0], PAIRS, num_entities)
    assert not any(counts.any() for counts in degrees.values())


@pytest.mark.parametrize("power", [0.25, 0.75, 1.0, 2.5, 30.0])
def test_weights_are_powers_of_degrees(power: float) -> None:
    degrees = np.array([0, 1, 2, 3, 1000, 10**9])
    weights = negatives.degree_weights(degrees, power)
    assert weights.dtype == np.int64 and weights[0] == 0 and (weights[1:] >= 1).all()
    assert 2**50 < weights.sum() < 2**53
    exact = np.array([(int(degree) / 10**9) ** power for degree in degrees])
    np.testing.assert_allclose(weights / weights.max(), exact, rtol=1e-9, atol=2.0**-50)
    assert not negatives.degree_weights(np.zeros(4, np.int64), power).any()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9).filter(any), st.integers(0, 2**64 - 1))
def test_each_place_of_the_cumulative_sum_is_one_number(weights: list[int], key: int) -> None:
    """The draw is the lookup of a uniform place among as many copies of each number as its weight."""
    copies = [number for number, weight in enumerate(weights) for _ in range(weight)]
    places = negatives.below(key, 50, len(copies))
    expected = [copies[place] for place in places]
    assert negatives.draw(key, 50, len(weights), np.cumsum(weights)).tolist() == expected


def test_global_negatives_do_not_depend_on_the_partitioning_and_local_ones_stay_local() -> None:
    weights = {"person": negatives.degree_weights(np.arange(50) % 7, 0.75)}
    drawn = []
    for shift in (0, 7):
        node_ids = {"person": (np.arange(50) * 3 + shift) % 50}
        mixed = MixedNegatives(60, (1, 0, 0), node_ids, {"person": (10, 30)}, [("person",) * 2], 3, weights)
        nodes = mixed.sample("person", a_batch(0, 0, 2), 0)
        assert (nodes == UniformNegatives(60, node_ids, 3, weights).sample("person", 0, 2, 0)).all()
        drawn.append(np.argsort(node_ids["person"])[nodes])
    assert (drawn[0] == drawn[1]).all()
    node_ids = {"person": random.permutation(50)}
    mixed = MixedNegatives(1000, (0, 1, 0), node_ids, {"person": (10, 30)}, [("person",) * 2], 3, weights)
    nodes = np.concatenate([mixed.sample("person", a_batch(0, 0, index), 0) for index in range(60)])
    degrees = np.arange(50)[np.argsort(node_ids["person"])] % 7
    expect_shares(nodes, np.where((np.arange(50) >= 10) & (np.arange(50) < 30), degrees**0.75, 0))


def test_a_type_and_a_machine_without_triples_draw_uniformly() -> None:
    node_ids = {"person": np.arange(50), "place": np.arange(9)}
    weights = {"person": np.r_[np.ones(10, np.int64), np.zeros(40, np.int64)], "place": np.zeros(9, np.int64)}
    ranges = {"person": (20, 30), "place": (0, 9)}
    mixed = MixedNegatives(100, (0.5, 0.5, 0), node_ids, ranges, [("person",) * 2], 3, weights)
    drawn = mixed.sample("person", a_batch(), 0)
    assert (drawn[:50] < 10).all() and len(set(drawn[50:].tolist())) > 5
    assert ((drawn[50:] >= 20) & (drawn[50:] < 30)).all()
    assert len(set(mixed.sample("place", a_batch(), 0).tolist())) == 9


GRAPH_ENTITIES, NUM_RELATIONS = 7, 3
ENTITY, REL = st.integers(0, GRAPH_ENTITIES - 1), st.integers(0, NUM_RELATIONS - 1)
ORIGINAL_IDS = {
    "entity": np.random.default_rng(1).permutation(GRAPH_ENTITIES),
    RELATION: np.random.default_rng(2).permutation(NUM_RELATIONS),
}


@settings(max_examples=150, deadline=None)
@given(
    triples=st.lists(st.tuples(ENTITY, REL, ENTITY), max_size=60),
    queries=st.lists(st.tuples(ENTITY, REL), max_size=12),
    negatives=st.lists(ENTITY, min_size=1, max_size=20),
    side=st.sampled_from(list(Side)),
)
def test_masks_are_those_of_looking_at_every_triple(triples, queries, negatives, side) -> None:
    index = KnownTriples([np.array(triples, np.int64).reshape(-1, 3)], NUM_RELATIONS)
    known = KnownAnswers(index, ORIGINAL_IDS)
    anchors, relations = np.array(queries, np.int64).reshape(-1, 2).T
    known_negatives = known.among(side, "entity", anchors, relations, "entity", np.array(negatives))

    def is_known(anchor: int, relation: int, answer: int) -> bool:
        a, b = (int(ORIGINAL_IDS["entity"][node]) for node in (anchor, answer))
        r = int(ORIGINAL_IDS[RELATION][relation])
        return ((a, r, b) if side is Side.TAIL else (b, r, a)) in triples

    expected = np.array([[is_known(*query, answer) for answer in negatives] for query in queries], bool)
    for plainly in (False, True):
        mask = np.zeros((len(queries), len(negatives)), bool)
        known_negatives.ignore(mask, plainly)
        assert (mask == expected.reshape(mask.shape)).all()
    scores = np.ones((len(queries), len(negatives)), np.float32)
    known_negatives.overwrite(scores, np.float32(-5))
    assert (scores == np.where(expected.reshape(scores.shape), -5, 1)).all()
    are_known = [is_known(anchor, relation, anchor) for anchor, relation in queries]
    assert known_negatives.is_own_known.tolist() == are_known
