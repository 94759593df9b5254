"""Draws by degree: exact degrees, exact distribution, the same for every partitioning."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dglkge.sampling import draws
from dglkge.sampling.draws import WeightedDraw, count_degrees, degree_weights
from dglkge.sampling.edge_batches import EdgeBatch, EdgeGroup
from dglkge.sampling.negatives import MixedNegatives, UniformNegatives

TYPES = [("person", "person"), ("person", "place"), ("place", "day")]
NUM_ENTITIES = {"person": 50, "place": 9, "day": 3}
random = np.random.default_rng(5)


def a_graph(num_triples: int) -> np.ndarray:
    relations = random.integers(0, 3, num_triples)
    columns = []
    for side in (0, 1):
        limits = np.array([NUM_ENTITIES[TYPES[relation][side]] for relation in relations])
        columns.append((limits * random.random(num_triples) ** 3).astype(np.int64))
    return np.stack([columns[0], relations, columns[1]], axis=1)


def chi_squared(counts: np.ndarray, shares: np.ndarray) -> float:
    """Return the statistic in standard deviations from its mean, n - 1."""
    assert (counts[shares == 0] == 0).all()
    expected = counts.sum() * shares[shares > 0]
    freedom = len(expected) - 1
    statistic = ((counts[shares > 0] - expected) ** 2 / expected).sum()
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_degrees_are_counted_by_type(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "TRIPLES_A_BLOCK", block)
    triples = a_graph(400)
    expected: Counter = Counter()
    for head, relation, tail in triples.tolist():
        lhs, rhs = TYPES[relation]
        expected[lhs, head] += 1
        expected[rhs, tail] += 1
    found = count_degrees(triples, TYPES, NUM_ENTITIES)
    for name, num in NUM_ENTITIES.items():
        assert found[name].tolist() == [expected[name, entity] for entity in range(num)]


def test_degrees_of_one_type_and_of_no_triples() -> None:
    triples = np.array([[0, 0, 1], [1, 0, 1]])
    assert count_degrees(triples, [("e", "e")], {"e": 3})["e"].tolist() == [1, 3, 0]
    assert count_degrees(triples[:0], [("e", "e")], {"e": 3})["e"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("power", [0.25, 0.75, 1.0, 2.5, 30.0])
def test_weights_are_powers_of_degrees(power: float) -> None:
    degrees = np.array([0, 1, 2, 3, 1000, 10**9])
    weights = degree_weights(degrees, power)
    assert weights.dtype == np.int64 and weights[0] == 0 and (weights[1:] >= 1).all()
    assert 2**50 < weights.sum() < 2**53
    exact = np.array([(int(degree) / 10**9) ** power for degree in degrees])
    np.testing.assert_allclose(weights / weights.max(), exact, rtol=1e-9, atol=2.0**-50)


def test_entities_without_triples_are_never_drawn() -> None:
    assert degree_weights(np.zeros(4, np.int64), 0.75).tolist() == [0] * 4
    draw = WeightedDraw(degree_weights(np.array([0, 5, 0, 0, 1, 0]), 1.0))
    assert set(draw.draw(3, 1000).tolist()) == {1, 4}


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9).filter(any), st.integers(0, 2**64 - 1))
def test_each_place_of_the_cumulative_sum_is_one_number(weights: list[int], key: int) -> None:
    """The draw is the lookup of a uniform place among as many copies of each number as its weight."""
    copies = [number for number, weight in enumerate(weights) for _ in range(weight)]
    places = draws.below(key, 50, len(copies))
    expected = [copies[place] for place in places]
    assert WeightedDraw(np.array(weights)).draw(key, 50).tolist() == expected


@pytest.mark.parametrize("power", [0.5, 0.75, 1.0])
def test_the_distribution_is_that_of_the_power(power: float) -> None:
    degrees = count_degrees(a_graph(2000), TYPES, NUM_ENTITIES)["person"]
    draw = WeightedDraw(degree_weights(degrees, power))
    counts = np.bincount(np.concatenate([draw.draw(key, 1000) for key in range(100)]), minlength=50)
    shares = np.where(degrees > 0, degrees.astype(float) ** power, 0)
    assert abs(chi_squared(counts, shares / shares.sum())) < 5
    # The statistic does tell powers apart.
    other = np.where(degrees > 0, degrees.astype(float) ** (power + 0.1), 0)
    assert chi_squared(counts, other / other.sum()) > 20


def a_batch(index: int) -> EdgeBatch:
    ids = np.arange(4)
    return EdgeBatch(0, index, 4, ids, ids, ids, ids, None, (EdgeGroup(0, 0, 0, 4),))


def test_global_negatives_do_not_depend_on_the_partitioning_and_local_ones_stay_local() -> None:
    weights = {"person": degree_weights(np.arange(50) % 7, 0.75)}
    drawn = []
    for shift in (0, 7):
        node_ids = {"person": (np.arange(50) * 3 + shift) % 50}
        mixed = MixedNegatives(60, (1, 0, 0), node_ids, {"person": (10, 30)}, [("person",) * 2], 3, weights)
        nodes = mixed.sample("person", a_batch(2), 0)
        assert (nodes == UniformNegatives(60, node_ids, 3, weights).sample("person", 0, 2, 0)).all()
        drawn.append(np.argsort(node_ids["person"])[nodes])
    assert (drawn[0] == drawn[1]).all()
    node_ids = {"person": random.permutation(50)}
    mixed = MixedNegatives(1000, (0, 1, 0), node_ids, {"person": (10, 30)}, [("person",) * 2], 3, weights)
    nodes = np.concatenate([mixed.sample("person", a_batch(index), 0) for index in range(60)])
    of_nodes = np.arange(50)[np.argsort(node_ids["person"])] % 7
    shares = np.where((np.arange(50) >= 10) & (np.arange(50) < 30), of_nodes**0.75, 0)
    assert abs(chi_squared(np.bincount(nodes, minlength=50), shares / shares.sum())) < 5


def test_a_type_and_a_machine_without_triples_draw_uniformly() -> None:
    node_ids = {"person": np.arange(50), "place": np.arange(9)}
    weights = {"person": np.r_[np.ones(10, np.int64), np.zeros(40, np.int64)], "place": np.zeros(9, np.int64)}
    ranges = {"person": (20, 30), "place": (0, 9)}
    mixed = MixedNegatives(100, (0.5, 0.5, 0), node_ids, ranges, [("person",) * 2], 3, weights)
    drawn = mixed.sample("person", a_batch(0), 0)
    assert (drawn[:50] < 10).all() and len(set(drawn[50:].tolist())) > 5
    assert ((drawn[50:] >= 20) & (drawn[50:] < 30)).all()
    assert len(set(mixed.sample("place", a_batch(0), 0).tolist())) == 9
