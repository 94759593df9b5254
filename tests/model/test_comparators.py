"""The rounding bounds hold: a float32 score beyond the bound decides as float64 does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.model.functions.comparators import (
    Cosine,
    Dot,
    NegativeL1,
    NegativeL2,
    NegativeModulus,
    NegativeSquaredL2,
)

COMPARATORS = [Dot(), NegativeL2(), NegativeL1(), NegativeModulus(), NegativeSquaredL2(), Cosine()]


def rows_near(random: np.random.Generator, center: np.ndarray, num_rows: int, spread: float) -> np.ndarray:
    """Rows at distances from the center that span many orders of magnitude, the center among them."""
    sizes = 10.0 ** random.uniform(-9, 0, size=(num_rows, 1)) * spread
    rows = center + sizes * random.normal(size=(num_rows, len(center)))
    rows[0] = center
    return rows.astype(np.float32)


@settings(max_examples=80, deadline=None)
@given(
    which=st.integers(0, len(COMPARATORS) - 1),
    dim=st.sampled_from([2, 10, 64, 400]),
    log_scale=st.integers(-18, 15),
    seed=st.integers(0, 100_000),
    cluster=st.booleans(),
)
def test_beyond_the_bound_float32_is_right(which, dim, log_scale, seed, cluster):
    """Each candidate in turn is the true answer; all others are compared with it."""
    comparator = COMPARATORS[which]
    random = np.random.default_rng(seed)
    center = random.normal(size=dim) * 10.0**log_scale
    candidates = torch.from_numpy(rows_near(random, center if cluster else 0 * center, 40, 10.0**log_scale))
    query = torch.from_numpy(rows_near(random, center, 6, 10.0**log_scale).astype(np.float64) * (1 + 1e-9))
    scores = comparator.compare(query.float(), candidates).double()
    max_norm = float(candidates.norm(dim=1).max())
    for row in range(len(query)):
        exact = comparator.compare_pairs(query[row].expand(40, -1), candidates.double())
        bound = comparator.rounding_bound(query[row].expand(40, -1), max_norm, exact)
        assert bound.shape == (40,) and (bound >= 0).all()
        greater = scores[row][None, :] > exact[:, None] + bound[:, None]
        less = scores[row][None, :] < exact[:, None] - bound[:, None]
        assert (exact[None, :].expand(40, 40)[greater] > exact[:, None].expand(40, 40)[greater]).all()
        assert (exact[None, :].expand(40, 40)[less] < exact[:, None].expand(40, 40)[less]).all()


@pytest.mark.parametrize("comparator", COMPARATORS, ids=lambda one: type(one).__name__)
def test_bound_is_tight_enough_to_be_useful(comparator):
    """Of 2,000 candidates only a few lie so close to the true score that float64 has to decide."""
    random = torch.Generator().manual_seed(3)
    query = torch.randn(20, 400, generator=random)
    candidates = torch.randn(2000, 400, generator=random)
    true_scores = comparator.compare_pairs(query.double(), candidates[:20].double())
    bound = comparator.rounding_bound(query.double(), float(candidates.norm(dim=1).max()), true_scores)
    close = (comparator.compare(query, candidates) - true_scores[:, None]).abs() <= bound[:, None]
    assert close.double().mean() < 0.005


@pytest.mark.parametrize("comparator", COMPARATORS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("norm", [1e25, float("inf"), float("nan")])
def test_bound_is_infinite_where_float32_may_overflow(comparator, norm):
    query = torch.full((1, 4), 1e20, dtype=torch.float64)
    true_scores = torch.tensor([-1.0], dtype=torch.float64)
    assert comparator.rounding_bound(query, norm, true_scores).tolist() == [float("inf")]
