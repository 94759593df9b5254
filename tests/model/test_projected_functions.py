"""PairRE, TripleRE and TransR: wide queries in blocks, rounding bounds, starts and refusals."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.model.functions import autograd
from dglkge.model.functions.comparators import unit_rows
from dglkge.model.functions.projected import ProjectedDistance, ScaledL1
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.training.building.checks import check_config
from dglkge.typing import RELATION, Side
from tests.model.regularizer_by_name import build_regularizer
from tests.model.rounding import check_bound

COMPARATORS = [ScaledL1(), ProjectedDistance(), SCORE_FUNCTIONS.get("transr_l1")()]
PROJECTED = ("pairre", "triplere", "transr", "transr_l1")


def draw(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(
    which=st.integers(0, len(COMPARATORS) - 1),
    dim=st.sampled_from([2, 10, 40]),
    log_scale=st.integers(-8, 6),
    seed=st.integers(0, 100_000),
)
def test_beyond_the_bound_float32_is_right(which, dim, log_scale, seed):
    """Each candidate in turn is the true answer; all others are compared with it."""
    comparator, random = COMPARATORS[which], np.random.default_rng(seed)
    center = random.normal(size=dim)
    sizes = 10.0 ** random.uniform(-9, 0, size=(40, 1))
    candidates = (center + sizes * random.normal(size=(40, dim))) * 10.0**log_scale
    candidates[0] = center * 10.0**log_scale
    rows = torch.from_numpy(candidates.astype(np.float32))
    query = torch.from_numpy(random.normal(size=(6, comparator.query_dim(dim))))
    # The first part is where a candidate is, so that distances are small beside the numbers.
    query[:3, :dim] = 0
    query[:3, :dim] = -comparator_offset(comparator, query[:3], rows[:1].double(), dim)
    check_bound(comparator, query, rows)


def comparator_offset(comparator, query, candidate, dim):
    if isinstance(comparator, ScaledL1):
        return -query[:, dim:] * unit_rows(candidate)
    return -torch.einsum("i,bij->bj", candidate[0], query[:, dim:].reshape(-1, dim, dim))


@pytest.mark.parametrize("comparator", COMPARATORS, ids=lambda comparator: type(comparator).__name__)
def test_bound_is_tight_enough_to_be_useful(comparator):
    query, candidates = draw(10, comparator.query_dim(50)).float(), draw(1000, 50, 1).float()
    true_scores = comparator.compare_pairs(query.double(), candidates[:10].double())
    bound = comparator.rounding_bound(query.double(), float(candidates.norm(dim=1).max()), true_scores)
    close = (comparator.compare(query, candidates) - true_scores[:, None]).abs() <= bound[:, None]
    assert close.double().mean() < 0.005


@pytest.mark.parametrize("comparator", COMPARATORS, ids=lambda comparator: type(comparator).__name__)
def test_bound_is_infinite_where_float32_may_overflow(comparator):
    query = torch.full((1, comparator.query_dim(4)), 1e20, dtype=torch.float64)
    true_scores = torch.tensor([-1.0], dtype=torch.float64)
    for norm in (1e25, float("inf"), float("nan")):
        assert comparator.rounding_bound(query, norm, true_scores).tolist() == [float("inf")]


@pytest.mark.parametrize("comparator", COMPARATORS, ids=lambda comparator: type(comparator).__name__)
def test_blocks_change_nothing(comparator, path):
    """Values and gradients are those of autograd through the definition, in float64."""
    for block_numbers, (num_queries, num_candidates) in itertools.product(
        [1, 50, 1 << 21], [(1, 1), (5, 9), (9, 2), (3, 0), (0, 3)]
    ):
        rows = [draw(num_queries, comparator.query_dim(4)), draw(num_candidates, 4, 1)]
        rows = [row.requires_grad_() for row in rows]
        weights = draw(num_queries, num_candidates, 2)
        with mock.patch.object(autograd, "CALLED_BLOCK_NUMBERS", block_numbers):
            scores = comparator.compare(*rows)
            gradients = torch.autograd.grad((scores * weights).sum(), rows)
        expected = comparator.compare_plainly(*rows)
        torch.testing.assert_close(scores, expected)
        torch.testing.assert_close(gradients, torch.autograd.grad((expected * weights).sum(), rows))


@pytest.fixture(params=["compiled", "torch"])
def path(request, monkeypatch):
    """Take the compiled loops, or what an accelerator takes."""
    if request.param == "torch":
        monkeypatch.setattr(autograd, "_compiled", lambda rows: False)


def test_compiled_gradients_in_float32(path):
    rows = [draw(70, 40).float(), draw(90, 20, 1).float()]
    # Terms of 0, the gradient of which is 0.
    rows[0][:5, :4], rows[1][:5, :4] = 0, 0
    wide = [row.double().requires_grad_() for row in rows]
    rows = [row.requires_grad_() for row in rows]
    weights = draw(70, 90, 2).float()
    comparator = ScaledL1()
    gradients = torch.autograd.grad((comparator.compare(*rows) * weights).sum(), rows)
    plain = torch.autograd.grad((comparator.compare_plainly(*wide) * weights).sum(), wide)
    for gradient, expected in zip(gradients, plain):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PROJECTED)
def test_gradients_are_finite_where_entities_meet(name):
    model = build_model(name, 6, False)
    for scale, compare in itertools.product((0.0, 1e-3, 1.0, 1e3), (model.compare, model.compare_pairs)):
        heads = scale * draw(4, 6).float()
        relations = model.initial_rows(RELATION, torch.arange(4), seed=0, scale=0.0)
        rows = [row.requires_grad_() for row in (heads, relations, heads.clone())]
        scores = compare(model.query(rows[0], rows[1], Side.TAIL), rows[2])
        gradients = torch.autograd.grad(scores.sum(), rows)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_the_length_of_an_entity_does_not_matter_to_pairre():
    model = build_model("pairre", 6, False)
    heads, relations, tails = draw(5, 6), draw(5, 12, 1), draw(5, 6, 2)
    scores = model.score(heads, relations, tails)
    torch.testing.assert_close(model.score(1e-6 * heads, relations, 7 * tails), scores)


@pytest.mark.parametrize("reciprocal", [False, True])
def test_how_relations_start(reciprocal):
    sides = 2 if reciprocal else 1
    for name, width in (("pairre", 12), ("triplere", 18), ("transr", 42)):
        model = build_model(name, 6, reciprocal)
        assert model.relation_width == sides * width
        rows = model.initial_rows(RELATION, torch.arange(50), seed=2, scale=1e-2).reshape(-1, width)
        if name == "transr":
            assert torch.equal(rows[:, 6:], torch.eye(6).reshape(1, -1).expand(len(rows), -1))
            assert float(rows[:, :6].std()) == pytest.approx(1e-2, rel=0.1)
            continue
        scalings = torch.cat([rows[:, :6], rows[:, -6:]])
        assert float(scalings.mean()) == pytest.approx(1, abs=1e-3)
        assert float(scalings.std()) == pytest.approx(1e-2, rel=0.1)
        if name == "triplere":
            assert float(rows[:, 6:12].mean()) == pytest.approx(0, abs=2e-3)


def test_penalty_spares_projections():
    model = build_model("transr", 3, False)
    heads, relations, tails = draw(5, 3), draw(5, 12, 1), draw(5, 3, 2)
    penalties = build_regularizer("n3", 0.1).query_penalties(model, heads, relations, tails, Side.TAIL)
    expected = 0.1 * sum(row.abs().pow(3).sum(1) for row in (heads, relations[:, :3], tails))
    torch.testing.assert_close(penalties, expected)


@pytest.mark.parametrize(("objective", "name"), [("one_vs_all", "transr"), ("k_vs_all", "transr_l1")])
def test_objectives_over_all_candidates_refuse_matrices(objective, name):
    overrides = ["dataset=d", f"model.score_function={name}", f"training.objective={objective}"]
    with pytest.raises(InputError) as caught:
        check_config(load_config(None, [*overrides, "loss.name=softmax"]))
    assert str(caught.value) == (
        f"training.objective is {objective} and model.score_function is {name}, whose queries hold a matrix, "
        "too wide to send to all trainers; allowed: negative_sampling, or another value of "
        "model.score_function"
    )
