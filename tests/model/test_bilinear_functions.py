"""RESCAL, SimplE, QuatE and Keci: algebras, relation prediction, first rows, options."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.training.building.checks import check_config
from dglkge.training.building.components import configured_model
from dglkge.typing import RELATION, Side
from tests.model.score_oracle import clifford, fitting_dim, float64_score

ALGEBRAS = [(0, 0), (0, 1), (1, 0), (2, 1), (0, 3), (3, 2)]
DIM = 12
NEW = ("rescal", "simple", "quate", "keci", "pairre", "triplere", "transr", "transr_l1")


def draw(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestKeci:
    @pytest.mark.parametrize("p, q", ALGEBRAS)
    def test_scores_are_those_of_the_algebra(self, p, q):
        """Of triples, on both sides, and of relations, by a product; gradients are those of differences."""
        model = build_model("keci", DIM, False, options={"p": p, "q": q})
        heads, relations, tails = (draw(5, DIM, seed) for seed in range(3))
        rows = zip(heads.tolist(), relations.tolist(), tails.tolist())
        expected = [clifford(*triple, p, q) for triple in rows]
        for side in Side:
            np.testing.assert_allclose(model.score(heads, relations, tails, side), expected, rtol=1e-12)
        function = build_model("keci", DIM, False, options={"p": p, "q": q}).score_function
        heads, relations, tails = (draw(num, DIM, num) for num in (4, 3, 4))
        assert function.has_relation_product
        scores = function.compare_relations(function.relation_query(heads, tails), relations)
        expected = [
            [clifford(head, relation, tail, p, q) for relation in relations.tolist()]
            for head, tail in zip(heads.tolist(), tails.tolist())
        ]
        np.testing.assert_allclose(scores, expected, rtol=1e-12)
        function = build_model("keci", DIM, True, options={"p": p, "q": q}).score_function
        rows = [draw(3, DIM, seed).requires_grad_() for seed in range(3)]
        for side in Side:
            assert torch.autograd.gradcheck(
                lambda anchor, relation, answer, side=side: function.compare(
                    function.query(anchor, relation, side), answer
                ),
                rows,
            )

    @pytest.mark.parametrize("p, q, name", [(0, 0, "distmult"), (0, 1, "complex")])
    def test_the_smallest_algebras_are_known_models(self, p, q, name):
        keci, known = build_model("keci", DIM, True, options={"p": p, "q": q}), build_model(name, DIM, True)
        heads, relations, tails = draw(5, DIM), draw(5, 2 * DIM, 1), draw(5, DIM, 2)
        for side in Side:
            scores = keci.score(heads, relations, tails, side)
            torch.testing.assert_close(scores, known.score(heads, relations, tails, side))

    def test_options_come_from_the_configuration(self):
        overrides = ["dataset=d", "model.dimension=12", "model.score_function={name: keci, p: 2, q: 3}"]
        model = configured_model(load_config(None, overrides))
        assert model.score_function.options == {"p": 2, "q": 3}
        assert build_model("keci", 4, True).score_function.options == {"p": 0, "q": 1}
        assert build_model("rescal", 4, True).score_function.options == {}

    @pytest.mark.parametrize(
        "overrides, words",
        [
            (
                ["model.score_function={name: keci, p: 2}", "model.dimension=7"],
                "the dimension must be a multiple of 4 (1 + p + q), got 7",
            ),
            (
                ["model.score_function.p=2"],
                "model.score_function.p has no effect here; it is an option of keci",
            ),
            (
                ["model.score_function={name: keci, q: -1}"],
                "model.score_function.q is -1; allowed: at least 0",
            ),
        ],
    )
    def test_what_is_refused(self, overrides, words):
        with pytest.raises(InputError) as caught:
            check_config(load_config(None, ["dataset=d", *overrides]))
        assert words in str(caught.value)

    def test_options_of_another_kind(self):
        for value in (-1, 1.5, "x", True):
            with pytest.raises(
                InputError, match="q of the score function 'keci' is .*; allowed: (a whole number|at least 0)"
            ):
                build_model("keci", 4, True, options={"q": value})
        with pytest.raises(InputError, match="'rescal' has no option 'p'; its options: none"):
            build_model("rescal", 4, True, options={"p": 1})


@pytest.mark.parametrize("name", NEW)
def test_relations_are_compared_as_triples_are_scored(name):
    """In both types; gradients are those of differences."""
    function, dim = SCORE_FUNCTIONS.get(name)(), fitting_dim(name, 6)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        heads, tails = draw(5, dim).to(dtype), draw(5, dim, 1).to(dtype)
        relations = draw(4, function.relation_dim(dim), 2).to(dtype)
        query = function.relation_query(heads, tails)
        assert query.shape == (5, function.relation_query_dim(dim))
        expected = [
            [float64_score(name, head, relation, tail) for relation in relations.double().tolist()]
            for head, tail in zip(heads.double().tolist(), tails.double().tolist())
        ]
        scores = function.compare_relations(query, relations)
        np.testing.assert_allclose(scores, expected, rtol=tolerance, atol=tolerance)

    def compare(heads, tails, relations):
        return function.compare_relations(function.relation_query(heads, tails), relations)

    dim = fitting_dim(name, 4)
    rows = [draw(3, dim), draw(3, dim, 1), draw(2, function.relation_dim(dim), 2)]
    assert torch.autograd.gradcheck(compare, [row.requires_grad_() for row in rows])


class TestQuatE:
    def test_the_length_of_a_relation_does_not_matter(self):
        model = build_model("quate", DIM, False)
        heads, relations, tails = (draw(5, DIM, seed) for seed in range(3))
        scores = model.score(heads, relations, tails)
        torch.testing.assert_close(model.score(heads, 1e-4 * relations, tails), scores)
        torch.testing.assert_close(
            model.score(heads, relations, tails, Side.HEAD), model.score(heads, 3 * relations, tails)
        )

    @pytest.mark.parametrize("reciprocal", [False, True])
    def test_relations_start_as_unit_quaternions(self, reciprocal):
        model = build_model("quate", 40, reciprocal)
        rows = model.initial_rows(RELATION, torch.arange(300), seed=2, scale=1e-3)
        assert rows.shape == (300, model.relation_width) and rows.dtype == torch.float32
        parts = rows.reshape(-1, 4, 10)
        torch.testing.assert_close(parts.norm(dim=1), torch.ones(len(parts), 10))
        # Uniform on the sphere: means 0, and mean squares 1 / 4, of every part.
        np.testing.assert_allclose(parts.mean((0, 2)), 0, atol=0.03)
        np.testing.assert_allclose(parts.square().mean((0, 2)), 0.25, atol=0.02)
        entities = model.initial_rows("person", torch.arange(300), seed=2, scale=1e-3)
        assert float(entities.abs().max()) < 0.01

    def test_a_relation_of_0_has_finite_scores_and_gradients(self):
        function = SCORE_FUNCTIONS.get("quate")()
        relation = torch.zeros(2, 8, requires_grad=True)
        scores = function.compare(function.query(torch.ones(2, 8), relation, Side.TAIL), torch.ones(3, 8))
        assert not scores.any()
        assert torch.isfinite(torch.autograd.grad(scores.sum(), relation)[0]).all()
        assert not function.initial_relations(torch.zeros(1, 8), 8).any()


class TestRESCAL:
    def test_as_bigraphs_linear_operator(self):
        """Its operator is a matrix from the left: A x."""
        model = build_model("rescal", 3, False)
        head, matrix, tail = draw(1, 3)[0], draw(3, 3, 1), draw(1, 3, 2)[0]
        score = model.score(head[None], matrix.reshape(1, 9), tail[None])[0]
        torch.testing.assert_close(score, head @ (matrix @ tail))
        torch.testing.assert_close(score, (matrix.T @ head) @ tail)

    def test_matrices_are_not_copied_for_each_pair(self):
        """(B, 1, D) and (N, D D) broadcast as a product of (B, D) and (D, N D)."""
        function = SCORE_FUNCTIONS.get("rescal")()
        # 2,000 times 300 matrices of 400 numbers would take 1 GB.
        query = function.operate(torch.ones(2000, 1, 20), torch.ones(300, 400))
        assert query.shape == (2000, 300, 20) and bool((query == 20).all())


@pytest.mark.parametrize(
    "name, dim, words",
    [
        ("simple", 5, r"the dimension must be even \(half as head, half as tail\), got 5"),
        ("quate", 6, r"the dimension must be a multiple of 4 \(quaternions\), got 6"),
    ],
)
def test_dimensions_that_are_refused(name, dim, words):
    with pytest.raises(InputError, match=words):
        build_model(name, dim, True)
