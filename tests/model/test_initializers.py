"""Initial rows: the same in any split, and their moments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.model import initializers
from dglkge.model.initializers import normal_rows, uniform_rows

DRAWS = [normal_rows, uniform_rows]


@settings(max_examples=40, deadline=None)
@given(
    which=st.integers(0, 1),
    dim=st.integers(1, 9),
    ids=st.lists(st.integers(0, 2**40), max_size=30),
    cut=st.integers(0, 30),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_same_in_any_split(which, dim, ids, cut, seed):
    draw = DRAWS[which]
    ids = np.array(ids, dtype=np.int64)
    whole = draw(ids, dim, seed, "person", 1.0)
    parts = [draw(part, dim, seed, "person", 1.0) for part in (ids[:cut], ids[cut:])]
    one_by_one = [draw(ids[i : i + 1], dim, seed, "person", 1.0) for i in range(len(ids))]
    assert whole.shape == (len(ids), dim) and whole.dtype == np.float32
    assert np.array_equal(whole, np.concatenate(parts))
    assert np.array_equal(whole, np.concatenate([np.empty((0, dim), np.float32), *one_by_one]))


@pytest.mark.parametrize("draw", DRAWS)
def test_blocks_do_not_show(draw, monkeypatch):
    ids = np.arange(1000)[::-1].copy()
    whole = draw(ids, 7, 5, "person", 1.0)
    monkeypatch.setattr(initializers, "BLOCK_PAIRS", 12)
    assert np.array_equal(draw(ids, 7, 5, "person", 1.0), whole)


@pytest.mark.parametrize("draw", DRAWS)
def test_seed_table_id_and_column_all_matter(draw):
    ids = np.arange(50)
    base = draw(ids, 8, 1, "person", 1.0)
    for other in (
        draw(ids, 8, 2, "person", 1.0),
        draw(ids, 8, 1, "town", 1.0),
        draw(ids + 50, 8, 1, "person", 1.0),
    ):
        assert not np.isclose(base, other).any()
    assert len(np.unique(base)) == base.size


@pytest.mark.parametrize("draw", DRAWS)
def test_wider_rows_start_with_the_narrower(draw):
    ids = np.arange(20)
    assert np.array_equal(draw(ids, 9, 1, "person", 1.0)[:, :5], draw(ids, 5, 1, "person", 1.0))


def test_moments_of_the_normal():
    rows = normal_rows(np.arange(5000), 200, 3, "person", 2.0).astype(np.float64) / 2.0
    assert abs(rows.mean()) < 0.004
    assert rows.var() == pytest.approx(1.0, abs=0.006)
    assert (rows**3).mean() == pytest.approx(0.0, abs=0.02)
    assert (rows**4).mean() == pytest.approx(3.0, abs=0.05)
    assert (np.abs(rows) < 1.959964).mean() == pytest.approx(0.95, abs=0.001)
    assert 4.3 < np.abs(rows).max() < 6.8


def test_moments_of_the_uniform():
    rows = uniform_rows(np.arange(5000), 200, 3, "person", 2.0).astype(np.float64)
    assert np.abs(rows).max() <= 2.0 and np.abs(rows).max() > 1.9999
    assert abs(rows.mean()) < 0.005 and rows.var() == pytest.approx(4 / 3, abs=0.006)
    share, _ = np.histogram(rows, bins=20, range=(-2, 2))
    assert np.abs(share / rows.size - 0.05).max() < 0.001


@pytest.mark.parametrize("draw", DRAWS)
def test_neighbours_are_uncorrelated(draw):
    """Neighbouring ids, neighbouring columns, and the two columns that share their bits."""
    rows = draw(np.arange(4000), 50, 7, "person", 1.0).astype(np.float64)
    rows /= rows.std()
    for first, second in ((rows[1:], rows[:-1]), (rows[:, 1:], rows[:, :-1]), (rows[:, ::2], rows[:, 1::2])):
        assert abs((first * second).mean()) < 0.01
        assert abs((first**2 * second**2).mean() - 1) < 0.02


@pytest.mark.parametrize("draw", DRAWS)
def test_no_ids(draw):
    assert draw(np.zeros(0, np.int64), 4, 1, "person", 1.0).shape == (0, 4)
