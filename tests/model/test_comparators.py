"""Comparators: scores, gradients, bounds of their rounding, and 16 bits."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dglkge.model.functions import autograd as distances
from dglkge.model.functions import comparators
from dglkge.model.functions.autograd import EuclideanDistance, ManhattanDistance, ModulusDistance
from dglkge.model.functions.comparators import Dot, NegativeL1, NegativeL2, NegativeModulus
from dglkge.model.functions.projected import ProjectedDistance, ScaledL1
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import RELATION, Side
from tests.model.dense_oracle import FORWARD_ONLY
from tests.model.rounding import check_bound
from tests.model.score_oracle import BIGRAPH_NAMES

SQUARED, COSINE = comparators.NegativeSquaredL2(), comparators.Cosine()
NARROW = [Dot(), NegativeL2(), NegativeL1(), NegativeModulus(), SQUARED, COSINE]
PROJECTED = [ScaledL1(), ProjectedDistance(), SCORE_FUNCTIONS.get("transr_l1")()]
SEEDS = st.integers(0, 100_000)


@pytest.fixture(params=["compiled", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the compiled loops, or what an accelerator takes."""
    if request.param == "torch":
        monkeypatch.setattr(distances, "_compiled", lambda rows: False)


def each(*members):
    return pytest.mark.parametrize("comparator", members, ids=[type(member).__name__ for member in members])


def rows_near(random: np.random.Generator, center: np.ndarray, num_rows: int, spread: float) -> np.ndarray:
    """Rows at distances from the center that span many orders of magnitude, the center among them."""
    sizes = 10.0 ** random.uniform(-9, 0, size=(num_rows, 1)) * spread
    rows = center + sizes * random.normal(size=(num_rows, len(center)))
    rows[0] = center
    return rows.astype(np.float32)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(NARROW), st.sampled_from([2, 10, 64, 400]), st.integers(-18, 15), SEEDS, st.booleans())
def test_beyond_the_bound_float32_is_right(comparator, dim, log_scale, seed, cluster):
    random = np.random.default_rng(seed)
    center = random.normal(size=dim) * 10.0**log_scale
    candidates = torch.from_numpy(rows_near(random, center if cluster else 0 * center, 40, 10.0**log_scale))
    query = torch.from_numpy(rows_near(random, center, 6, 10.0**log_scale).astype(np.float64) * (1 + 1e-9))
    check_bound(comparator, query, candidates, may_overflow=True)


@each(*NARROW, *PROJECTED)
def test_bound_is_tight_enough_to_be_useful(comparator):
    """Few candidates are so close that float64 decides; where float32 may overflow, all of them are."""
    random, dim = torch.Generator().manual_seed(3), 50 if comparator in PROJECTED else 400
    query = torch.randn(20, comparator.query_dim(dim), generator=random)
    candidates = torch.randn(2000, dim, generator=random)
    true_scores = comparator.compare_pairs(query.double(), candidates[:20].double())
    bound = comparator.rounding_bound(query.double(), float(candidates.norm(dim=1).max()), true_scores)
    close = (comparator.compare(query, candidates) - true_scores[:, None]).abs() <= bound[:, None]
    assert close.double().mean() < 0.005
    query = torch.full((1, comparator.query_dim(4)), 1e20, dtype=torch.float64)
    for norm in (1e25, float("inf"), float("nan")):
        assert comparator.rounding_bound(query, norm, true_scores[:1]).tolist() == [float("inf")]


@each(NegativeL2(), NegativeModulus(), NegativeL1(), *PROJECTED)
def test_values_and_gradients_equal_autograd_in_blocks_of_any_size(comparator, path):
    """Those of the definition, in float64."""
    random = torch.Generator().manual_seed(1)
    for num_queries, num_candidates in [(1, 1), (5, 9), (9, 2), (3, 0), (0, 3), (3, 130)]:
        shapes = [(num_queries, comparator.query_dim(8)), (num_candidates, 8)]
        rows = [torch.randn(shape, generator=random).double().requires_grad_() for shape in shapes]
        weights = torch.randn(num_queries, num_candidates, generator=random, dtype=torch.float64)
        expected = comparator.compare_plainly(*rows)
        expected_gradients = torch.autograd.grad((expected * weights).sum(), rows)
        for size in (1, 24, 50, 1 << 21):
            sizes = {"BLOCK_NUMBERS": size, "CALLED_BLOCK_NUMBERS": size}
            with mock.patch.multiple(distances, **sizes):
                values = comparator.compare(*rows)
                gradients = torch.autograd.grad((values * weights).sum(), rows)
            torch.testing.assert_close(values, expected)
            torch.testing.assert_close(gradients, expected_gradients)


class Sizes(TorchDispatchMode):
    """Notes the operations that run, and how many numbers the largest result has."""

    names, largest = (), 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        self.names = (*self.names, operation.overloadpacket.__name__)
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("function", [ModulusDistance.apply, ManhattanDistance.apply])
def test_on_a_device_blocks_are_few_and_no_result_has_a_number_for_each_dimension_of_all_pairs(function):
    """On torch's device without data: sizes and operations are those of a GPU."""
    query, candidates = (torch.empty(n, 256, device="meta", requires_grad=True) for n in (1000, 2000))
    num_pairs = 1000 * 2000
    with Sizes() as sizes:
        torch.autograd.grad(function(query, candidates).sum(), (query, candidates))
    assert num_pairs <= sizes.largest <= distances.DEVICE_BLOCK_NUMBERS < num_pairs * 256 / 10
    assert "_cdist_backward" not in sizes.names  # its memory, which torch takes inside, is that of all pairs
    assert 16 <= len(sizes.names) < 2000


def test_euclidean_gradient_never_exceeds_that_of_a_distance():
    """A distance has a gradient of length 1; rounding noise under the root must not blow it up."""
    random = torch.Generator().manual_seed(2)
    for offset in (0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2):
        query = torch.randn(50, 64, generator=random)
        candidates = query + offset * torch.randn(50, 64, generator=random)
        query.requires_grad_()
        distance = EuclideanDistance.apply(query, candidates).diagonal().sum()
        (grad,) = torch.autograd.grad(distance, query)
        assert grad.norm(dim=1).max() < 2.5
        if offset >= 1e-2:
            assert grad.norm(dim=1).min() > 0.9


@each(NegativeModulus(), NegativeL1(), ScaledL1())
def test_float32_is_near_float64_also_where_numbers_coincide_and_rows_are_not_contiguous(comparator, path):
    random = torch.Generator().manual_seed(3)
    shapes = ((comparator.query_dim(20), 70), (20, 90), (90, 70))
    query, candidates, weights = (torch.randn(shape, generator=random).T for shape in shapes)
    candidates = candidates.repeat_interleave(2, dim=1)[:, ::2]
    # Rows, and terms of 0: their gradient is 0.
    query[:9, :4], candidates[:9, :4] = 0, 0
    query[:5], candidates[:5] = 0, 0
    rows = [query.requires_grad_(), candidates.requires_grad_()]
    wide = [row.detach().double().requires_grad_() for row in rows]
    values, expected = comparator.compare(*rows), comparator.compare_plainly(*wide)
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
    gradients, expected_gradients = (
        torch.autograd.grad((scores * weights).sum(), leaves)
        for scores, leaves in ((values, rows), (expected, wide))
    )
    for gradient, expected_gradient in zip(gradients, expected_gradients):
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-4)


def with_bfloat16_products(function, rows, weights):
    """Return values and gradients with the products in bfloat16, as the training step asks for them."""
    with torch.autocast("cpu", torch.bfloat16):
        values = function(*rows)
    return values, torch.autograd.grad((values * weights).sum(), rows)


@each(NegativeL2(), Dot())
def test_products_in_bfloat16_are_near_the_float64_values(comparator, path):
    random = torch.Generator().manual_seed(7)
    rows = [torch.randn(n, 64, generator=random, requires_grad=True) for n in (20, 150)]
    weights = torch.randn(20, 150, generator=random)
    exact = [row.detach().double().requires_grad_() for row in rows]
    expected = comparator.compare_plainly(*exact)
    exact_gradients = torch.autograd.grad((expected * weights).sum(), exact)
    values, gradients = with_bfloat16_products(comparator.compare, rows, weights)
    assert values.dtype == torch.float32
    # The product is rounded to 8 bits, as its operands were: a few thousandths of |q| |c|, about 64 here.
    error = (values - expected).abs().max()
    assert 1e-4 < error < 0.4
    for got, exact_gradient in zip(gradients, exact_gradients):
        assert got.dtype == torch.float32
        assert 1e-5 < (got - exact_gradient).norm() / exact_gradient.norm() < 0.01


def test_distances_below_the_rounding_of_bfloat16_have_no_gradient(path):
    rows = torch.randn(6, 32, generator=torch.Generator().manual_seed(3))
    # The first candidates are the queries themselves; their true distance is 0.
    query, candidates = rows.clone().requires_grad_(), (rows * 1.0001).requires_grad_()
    values, (grad, _) = with_bfloat16_products(EuclideanDistance.apply, [query, candidates], torch.eye(6))
    assert values.diagonal().max() < 1.5
    assert grad.abs().max() == 0


def test_distances_that_are_not_numbers_stay_so(path):
    query = torch.tensor([[1.0, float("nan")], [3.0, 4.0]], requires_grad=True)
    candidates = torch.tensor([[0.0, 0.0], [float("inf"), 0.0]], requires_grad=True)
    values = EuclideanDistance.apply(query, candidates)
    assert values[0].isnan().all()
    assert values[1, 0] == 5
    assert not values[1, 1].isfinite()
    (grad_query,) = torch.autograd.grad(values.sum(), query)
    assert not grad_query.isfinite().all()


DIM = 32


def scores_and_gradients(model, side, is_narrow):
    random = torch.Generator().manual_seed(0)
    anchors, candidates = (torch.randn(n, DIM, generator=random, requires_grad=True) for n in (12, 40))
    relations = (0.3 * torch.randn(12, model.relation_width, generator=random)).requires_grad_()
    query = model.query(anchors, relations, side, torch.arange(12) % 3)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
        scores = model.compare(query, candidates).to(query.dtype)
    weights = torch.linspace(-1, 1, scores.numel()).view_as(scores)
    rows = (anchors, relations, candidates)
    return scores, torch.autograd.grad((scores * weights).sum(), rows, materialize_grads=True)


# Every third of PyTorch-BigGraph's pairs has each operator and each comparator.
@pytest.mark.parametrize("name", [*SCORE_FUNCTIONS, *BIGRAPH_NAMES[::3]])
def test_scores_and_gradients_are_near_those_of_float32(name):
    for reciprocal in (True, False):
        if name in FORWARD_ONLY and not reciprocal:
            continue
        model = build_model(name, DIM, reciprocal)
        for side in Side:
            expected, expected_gradients = scores_and_gradients(model, side, is_narrow=False)
            scores, gradients = scores_and_gradients(model, side, is_narrow=True)
            assert (scores - expected).abs().max() < 0.02 * expected.abs().max()
            for got, expected_gradient in zip(gradients, expected_gradients):
                assert (got - expected_gradient).norm() <= 0.05 * expected_gradient.norm()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PROJECTED), st.sampled_from([2, 10, 40]), st.integers(-8, 6), SEEDS)
def test_beyond_the_bound_float32_is_right_of_projections(comparator, dim, log_scale, seed):
    random = np.random.default_rng(seed)
    rows = torch.from_numpy(rows_near(random, random.normal(size=dim), 40, 1.0) * np.float32(10) ** log_scale)
    query = torch.from_numpy(random.normal(size=(6, comparator.query_dim(dim))))
    # The first part is where a candidate is, so that distances are small beside the numbers.
    first, parts = rows[:1].double(), query[:3, dim:]
    if isinstance(comparator, ScaledL1):
        query[:3, :dim] = parts * comparators.unit_rows(first)
    else:
        query[:3, :dim] = torch.einsum("i,bij->bj", first[0], parts.reshape(-1, dim, dim))
    check_bound(comparator, query, rows)


@pytest.mark.parametrize("name", ["pairre", "triplere", "transr", "transr_l1"])
def test_gradients_are_finite_where_entities_meet(name):
    model = build_model(name, 6, False)
    for scale, compare in itertools.product((0.0, 1e-3, 1.0, 1e3), (model.compare, model.compare_pairs)):
        heads = scale * torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        relations = model.initial_rows(RELATION, torch.arange(4), seed=0, scale=0.0)
        rows = [row.requires_grad_() for row in (heads, relations, heads.clone())]
        scores = compare(model.query(rows[0], rows[1], Side.TAIL), rows[2])
        gradients = torch.autograd.grad(scores.sum(), rows)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
