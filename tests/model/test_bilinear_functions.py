"""Keci's algebras and options; relation prediction by a product; QuatE's and RESCAL's limits; shared rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.model.functions.bilinear import RESCAL
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.training.building.checks import check_config
from dglkge.training.building.components import configured_model
from dglkge.typing import Side
from tests.model.score_oracle import clifford, fitting_dim, float64_score

DIM = 12


def draw(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("p, q", [(0, 0), (0, 1), (1, 0), (2, 1), (0, 3), (3, 2)])
def test_keci_scores_by_the_algebra(p, q):
    """Triples on both sides, and relations by a product; gradients are those of differences."""
    model = build_model("keci", DIM, False, options={"p": p, "q": q})
    heads, relations, tails = (draw(5, DIM, seed) for seed in range(3))
    pairs = zip(heads.numpy(), tails.numpy())
    expected = np.array([[clifford(h, r, t, p, q) for r in relations.numpy()] for h, t in pairs])
    for side in Side:
        scores = model.score(heads, relations, tails, side)
        np.testing.assert_allclose(scores, expected.diagonal(), rtol=1e-12)
    function = model.score_function
    assert function.has_relation_product
    scores = function.compare_relations(function.relation_query(heads, tails), relations)
    np.testing.assert_allclose(scores, expected, rtol=1e-12)
    rows = [draw(3, DIM, seed).requires_grad_() for seed in range(3)]
    for side in Side:

        def compare(anchor, relation, answer, side=side):
            return function.compare(function.query(anchor, relation, side), answer)

        assert torch.autograd.gradcheck(compare, rows)


def test_options_of_keci():
    overrides = ["dataset=d", "model.dimension=12", "model.score_function={name: keci, p: 2, q: 3}"]
    assert configured_model(load_config(None, overrides)).score_function.options == {"p": 2, "q": 3}
    for word, dim, message in (
        ("={name: keci, p: 2}", 7, "the dimension must be a multiple of 4 (1 + p + q), got 7"),
        (".p=2", 8, "model.score_function.p has no effect here; it is an option of keci"),
        ("={name: keci, q: -1}", 8, "model.score_function.q is -1; allowed: at least 0"),
    ):
        with pytest.raises(InputError) as caught:
            overrides = ["dataset=d", f"model.score_function{word}", f"model.dimension={dim}"]
            check_config(load_config(None, overrides))
        assert message in str(caught.value)
    with pytest.raises(InputError, match="q of the score function 'keci' is 1.5; allowed: a whole number"):
        build_model("keci", 4, True, options={"q": 1.5})
    with pytest.raises(InputError, match="'rescal' has no option 'p'; its options: none"):
        build_model("rescal", 4, True, options={"p": 1})


@pytest.mark.parametrize(
    "name", ["rescal", "simple", "quate", "keci", "pairre", "triplere", "transr", "transr_l1"]
)
def test_relations_are_compared_as_triples_are_scored(name):
    function, dim = SCORE_FUNCTIONS.get(name)(), fitting_dim(name, 6)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        heads, tails = draw(5, dim).to(dtype), draw(5, dim, 1).to(dtype)
        relations = draw(4, function.relation_dim(dim), 2).to(dtype)
        query = function.relation_query(heads, tails)
        assert query.shape == (5, function.relation_query_dim(dim))
        expected = [
            [float64_score(name, head, relation, tail) for relation in relations]
            for head, tail in zip(heads, tails)
        ]
        scores = function.compare_relations(query, relations)
        np.testing.assert_allclose(scores, expected, rtol=tolerance, atol=tolerance)

    def compare(heads, tails, relations):
        return function.compare_relations(function.relation_query(heads, tails), relations)

    dim = fitting_dim(name, 4)
    rows = [draw(3, dim), draw(3, dim, 1), draw(2, function.relation_dim(dim), 2)]
    assert torch.autograd.gradcheck(compare, [row.requires_grad_() for row in rows])


def test_a_quaternion_of_0_has_finite_scores_and_gradients():
    function = SCORE_FUNCTIONS.get("quate")()
    relation = torch.zeros(2, 8, requires_grad=True)
    scores = function.compare(function.query(torch.ones(2, 8), relation, Side.TAIL), torch.ones(3, 8))
    assert not scores.any()
    assert torch.isfinite(torch.autograd.grad(scores.sum(), relation)[0]).all()
    assert not function.initial_relations(torch.zeros(1, 8), 8).any()


def test_matrices_of_rescal_are_not_copied_for_each_pair():
    """(B, 1, D) and (N, D D) broadcast as a product of (B, D) and (D, N D)."""
    # 2,000 times 300 matrices of 400 numbers would take 1 GB.
    query = SCORE_FUNCTIONS.get("rescal")().operate(torch.ones(2000, 1, 20), torch.ones(300, 400))
    assert query.shape == (2000, 300, 20) and bool((query == 20).all())


@pytest.mark.parametrize(
    ("name", "reciprocal", "side"),
    [
        ("rescal", False, Side.TAIL),
        ("rescal", False, Side.HEAD),
        ("rescal", True, Side.HEAD),
        ("complex", True, Side.TAIL),
        ("complex", False, Side.HEAD),
    ],
)
def test_shared_rows_give_the_queries_of_own_rows(name, reciprocal, side):
    model = build_model(name, DIM, reciprocal)
    random = torch.Generator().manual_seed(1)
    entities = torch.randn(5, DIM, generator=random, requires_grad=True)
    relations = torch.randn(3, model.relation_width, generator=random, requires_grad=True)
    places = torch.tensor([1, 2, 1, 0, 1])
    queries = model.query(entities, relations, side, places=places)
    expected = model.query(entities, relations[places], side)
    torch.testing.assert_close(queries, expected)
    gradients, expected_gradients = (
        torch.autograd.grad(values.square().sum(), (entities, relations)) for values in (queries, expected)
    )
    torch.testing.assert_close(gradients, expected_gradients)


def test_a_subclass_does_not_share_unless_it_says_so():
    class Shifted(RESCAL):
        def operate(self, entity, relation):
            return super().operate(entity, relation) + 1

    assert RESCAL.shares_relations
    assert not Shifted.shares_relations
    assert not KgeModel(Shifted(), DIM, True).score_function.shares_relations
