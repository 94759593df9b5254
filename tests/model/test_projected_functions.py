"""PairRE, TripleRE and TransR: rounding bounds, gradients in float32 and where entities meet, a refusal."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.model.functions.comparators import unit_rows
from dglkge.model.functions.projected import ProjectedDistance, ScaledL1
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.training.building.checks import check_config
from dglkge.typing import RELATION, Side
from tests.model.rounding import check_bound

COMPARATORS = [ScaledL1(), ProjectedDistance(), SCORE_FUNCTIONS.get("transr_l1")()]


def draw(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, width, generator=generator, dtype=torch.float64).float()


@settings(max_examples=60, deadline=None)
@given(
    comparator=st.sampled_from(COMPARATORS),
    dim=st.sampled_from([2, 10, 40]),
    log_scale=st.integers(-8, 6),
    seed=st.integers(0, 100_000),
)
def test_beyond_the_bound_float32_is_right(comparator, dim, log_scale, seed):
    """Each candidate in turn is the true answer; all others are compared with it."""
    random = np.random.default_rng(seed)
    center = random.normal(size=dim)
    sizes = 10.0 ** random.uniform(-9, 0, size=(40, 1))
    candidates = (center + sizes * random.normal(size=(40, dim))) * 10.0**log_scale
    candidates[0] = center * 10.0**log_scale
    rows = torch.from_numpy(candidates.astype(np.float32))
    query = torch.from_numpy(random.normal(size=(6, comparator.query_dim(dim))))
    # The first part is where a candidate is, so that distances are small beside the numbers.
    first, parts = rows[:1].double(), query[:3, dim:]
    if isinstance(comparator, ScaledL1):
        query[:3, :dim] = parts * unit_rows(first)
    else:
        query[:3, :dim] = torch.einsum("i,bij->bj", first[0], parts.reshape(-1, dim, dim))
    check_bound(comparator, query, rows)


def test_scaled_gradients_in_float32(path):
    rows = [draw(70, 40), draw(90, 20, 1)]
    # Terms of 0, the gradient of which is 0.
    rows[0][:5, :4], rows[1][:5, :4] = 0, 0
    wide = [row.double().requires_grad_() for row in rows]
    rows = [row.requires_grad_() for row in rows]
    weights, comparator = draw(70, 90, 2), ScaledL1()
    gradients = torch.autograd.grad((comparator.compare(*rows) * weights).sum(), rows)
    plain = torch.autograd.grad((comparator.compare_plainly(*wide) * weights).sum(), wide)
    for gradient, expected in zip(gradients, plain):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["pairre", "triplere", "transr", "transr_l1"])
def test_gradients_are_finite_where_entities_meet(name):
    model = build_model(name, 6, False)
    for scale, compare in itertools.product((0.0, 1e-3, 1.0, 1e3), (model.compare, model.compare_pairs)):
        heads = scale * draw(4, 6)
        relations = model.initial_rows(RELATION, torch.arange(4), seed=0, scale=0.0)
        rows = [row.requires_grad_() for row in (heads, relations, heads.clone())]
        scores = compare(model.query(rows[0], rows[1], Side.TAIL), rows[2])
        gradients = torch.autograd.grad(scores.sum(), rows)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize(("objective", "name"), [("one_vs_all", "transr"), ("k_vs_all", "transr_l1")])
def test_objectives_over_all_candidates_refuse_matrices(objective, name):
    overrides = ["dataset=d", f"model.score_function={name}", f"training.objective={objective}"]
    message = f"training.objective is {objective} and model.score_function is {name}, whose queries hold a"
    with pytest.raises(InputError, match=message):
        check_config(load_config(None, [*overrides, "loss.name=softmax"]))
