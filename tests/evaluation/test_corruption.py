"""Drawn false triples: never a known one, uniform among the others, and from the pool where there is one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.data.known_triples import KnownTriples
from dglkge.evaluation.classification import draw_corruptions, draw_sides, seen_entities
from dglkge.typing import Relation, Side

RELATIONS = [Relation("knows", "person", "person"), Relation("visits", "person", "town")]
SIZES = {"person": 9, "town": 4}

a_relation = st.integers(0, 1)
some_triples = st.lists(
    st.tuples(st.integers(0, 8), a_relation, st.integers(0, 3)), min_size=1, max_size=40
).map(lambda rows: np.array(rows, dtype=np.int64))


def allowed(triple, side, known, pool=None) -> list[int]:
    """List by hand what may replace one end of a triple."""
    size = SIZES[RELATIONS[triple[1]].candidate_type(side)]
    found = []
    for entity in range(size) if pool is None else pool:
        corrupted = list(triple)
        corrupted[side.column] = entity
        if entity != triple[side.column] and tuple(corrupted) not in known:
            found.append(int(entity))
    return found


@settings(max_examples=80, deadline=None)
@given(triples=some_triples, more=some_triples, with_pools=st.booleans(), seed=st.integers(0, 99))
@pytest.mark.parametrize("side", Side)
def test_draws_are_unknown(side, triples, more, with_pools, seed):
    known = {tuple(row) for row in more.tolist()}
    pools = seen_entities(more) if with_pools else None
    index = KnownTriples([more], len(RELATIONS))
    found = draw_corruptions(triples, side, 3, RELATIONS, SIZES, index, (seed,), pools)
    expected_sources = []
    for place, triple in enumerate(triples.tolist()):
        pool = sorted({row[side.column] for row in more.tolist() if row[1] == triple[1]})
        here = allowed(triple, side, known, pool) if with_pools else []
        here = here or allowed(triple, side, known)
        drawn = found.triples[found.source == place]
        assert all(row[side.column] in here for row in drawn.tolist())
        assert all(
            row[[1, side.anchor_column]].tolist() == [triple[1], triple[side.anchor_column]] for row in drawn
        )
        expected_sources += [place] * (3 if here else 0)
    assert found.source.tolist() == expected_sources


def test_pools_are_the_entities_of_each_side():
    triples = np.array([[3, 0, 1], [2, 0, 1], [3, 0, 0], [5, 1, 2]])
    found = {key: ids.tolist() for key, ids in seen_entities(triples).items()}
    assert found == {(0, Side.HEAD): [2, 3], (1, Side.HEAD): [5], (0, Side.TAIL): [0, 1], (1, Side.TAIL): [2]}


def test_draws_are_uniform_and_repeatable():
    triples = np.array([[0, 0, 4], [1, 1, 2]])
    known = KnownTriples([np.array([[0, 0, 1], [0, 0, 8], [0, 0, 4]])], 2)
    draw = [
        draw_corruptions(triples, Side.TAIL, 30_000, RELATIONS, SIZES, known, (s, "x")) for s in (1, 1, 2)
    ]
    assert np.array_equal(draw[0].triples, draw[1].triples)
    assert not np.array_equal(draw[0].triples, draw[2].triples)
    for place, options in ((0, [0, 2, 3, 5, 6, 7]), (1, [0, 1, 3])):
        tails = draw[0].triples[draw[0].source == place, 2]
        counts = np.array([(tails == option).sum() for option in options])
        assert counts.sum() == len(tails) == 30_000
        expected = len(tails) / len(options)
        freedom = len(options) - 1
        assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)


def test_both_sides_are_corrupted():
    sides = draw_sides(10_000, (3, "valid"))
    assert abs(sides.mean() - 0.5) < 0.02
    assert np.array_equal(sides[:50], draw_sides(50, (3, "valid")))
    assert not np.array_equal(sides, draw_sides(10_000, (3, "tested")))
