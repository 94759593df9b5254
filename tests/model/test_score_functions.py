"""Every score function against its formula, both ways of comparing, both sides; what some have besides."""

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
from tests.model.dense_oracle import DENSE, FORWARD_ONLY
from tests.model.score_oracle import ORACLES, clifford, fitting_dim, float64_score

NAMES = sorted(ORACLES)
NARROW = [name for name in NAMES if SCORE_FUNCTIONS.get(name)().query_dim(6) == 6]
DIM = 6

each_function = pytest.mark.parametrize("name", NAMES)


def random_rows(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(name: str, num_rows: int = 7, dtype=torch.float64):
    """A score function with random heads, relations and tails, rows to rows."""
    dim = fitting_dim(name, DIM)
    function = SCORE_FUNCTIONS.get(name)().bound(dim, 0)
    widths = (dim, function.relation_dim(dim), dim)
    rows = [random_rows(num_rows, width, seed).to(dtype) for seed, width in enumerate(widths)]
    if function.has_times:
        # A module without a data set has one time.
        rows[1][:, -1] = 0 if function.has_module else torch.arange(num_rows).remainder(3)
    return function, *rows


@pytest.mark.parametrize(
    ("name", "reciprocal"), [(name, kind) for name in NAMES for kind in (name in FORWARD_ONLY, True)]
)
def test_equals_the_formula(name, reciprocal):
    """On both sides; a reciprocal relation acts forwards on the entity given, by its half of the row."""
    function, heads, forwards, tails = draw(name)
    model = build_model(name, heads.shape[1], reciprocal)
    relations = torch.cat([forwards, forwards.flip(0)], dim=1) if reciprocal else forwards
    assert relations.shape[1] == model.relation_width
    for side in Side:
        anchors, answers = (heads, tails) if side is Side.TAIL else (tails, heads)
        if reciprocal:
            triples = zip(anchors, forwards if side is Side.TAIL else forwards.flip(0), answers)
        else:
            triples = zip(heads, forwards, tails)
        expected = [float64_score(name, *(row.tolist() for row in triple)) for triple in triples]
        with torch.no_grad():
            query = model.query(anchors, relations, side)
            pairs, matrix = model.compare_pairs(query, answers), model.compare(query, answers)
            scores = model.score(heads, relations, tails, side)
        np.testing.assert_allclose(pairs, expected, rtol=1e-12)
        np.testing.assert_allclose(scores, expected, rtol=1e-12)
        np.testing.assert_allclose(matrix.diagonal(), expected, rtol=1e-6, atol=1e-6)
    if not reciprocal and name not in DENSE:  # reading backwards twice changes nothing
        assert torch.equal(function.adjoint(function.adjoint(forwards)), forwards)
    # Queries of several shapes broadcast.
    query = function.query(heads.unsqueeze(1), forwards[:3], Side.TAIL)
    assert query.shape == (7, 3, function.query_dim(heads.shape[1]))
    torch.testing.assert_close(query[2, 1], function.query(heads[2], forwards[1], Side.TAIL))


@each_function
def test_matrix_and_pairs_agree(name):
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 2e-3)):
        function, heads, relations, tails = draw(name, dtype=dtype)
        query = function.query(heads, relations, Side.TAIL)
        # Of a wide query the first part is near what its answers are.
        candidates = torch.cat([tails, tails[:2], query[:2, : tails.shape[1]], tails * 0])
        matrix = function.compare(query, candidates)
        assert matrix.shape == (len(query), len(candidates)) and matrix.dtype == dtype
        pairs = function.compare_pairs(query.unsqueeze(1), candidates)
        torch.testing.assert_close(matrix, pairs, rtol=1e-5, atol=tolerance)


@each_function
def test_gradients(name):
    function, heads, relations, tails = draw(name)
    rows = [row.requires_grad_() for row in (heads, relations, tails[:4])]
    for side in [Side.TAIL] if name in FORWARD_ONLY else Side:

        def scores(anchor, relation, candidates, side=side):
            query = function.query(anchor, relation, side)
            return function.compare(query, candidates), function.compare_pairs(query[:4], candidates)

        assert torch.autograd.gradcheck(scores, rows)


@pytest.mark.parametrize("name", NARROW)
def test_gradient_is_finite_at_distance_0(name):
    function, heads, *_ = draw(name, dtype=torch.float32)
    for scale in (0.0, 1e-20, 1.0, 1e3):
        rows, same = ((heads * scale).requires_grad_() for _ in range(2))
        for compare in (function.compare, function.compare_pairs):
            grads = torch.autograd.grad(compare(rows, same).sum(), [rows, same])
            assert all(torch.isfinite(grad).all() for grad in grads)
            assert max(float(grad.abs().max()) for grad in grads) <= max(10.0, 10 * scale)


def test_dimensions():
    words = {"simple": "even (half as head, half as tail)", "quate": "a multiple of 4 (quaternions)"}
    complex_valued = {"complex", "rotate", "conex", "tcomplex", "tntcomplex"}
    words |= dict.fromkeys(complex_valued, "even (half real, half imaginary)")
    for name in NAMES:
        function = SCORE_FUNCTIONS.get(name)()
        assert function.complex_valued == (name in complex_valued), name
        assert (function.relation_init == "phase") == (name == "rotate"), name
        assert function.other_dims(4) == "" and function.other_dims(0) == "a positive number", name
        if name in words:
            assert function.other_dims(5) == words[name], name


@pytest.mark.parametrize("p, q", [(0, 0), (0, 1), (1, 0), (2, 1), (0, 3), (3, 2)])
def test_keci_scores_by_the_algebra(p, q):
    """Triples on both sides, and relations by a product; gradients are those of differences."""
    model = build_model("keci", 12, False, options={"p": p, "q": q})
    heads, relations, tails = (random_rows(5, 12, seed) for seed in range(3))
    pairs = zip(heads.numpy(), tails.numpy())
    expected = np.array([[clifford(h, r, t, p, q) for r in relations.numpy()] for h, t in pairs])
    for side in Side:
        scores = model.score(heads, relations, tails, side)
        np.testing.assert_allclose(scores, expected.diagonal(), rtol=1e-12)
    function = model.score_function
    assert function.has_relation_product
    scores = function.compare_relations(function.relation_query(heads, tails), relations)
    np.testing.assert_allclose(scores, expected, rtol=1e-12)
    rows = [random_rows(3, 12, seed).requires_grad_() for seed in range(3)]
    for side in Side:
        assert torch.autograd.gradcheck(lambda h, r, t, side=side: model.score(h, r, t, side), rows)


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
    with pytest.raises(InputError, match="'rescal' has no option 'p'; its options: none"):
        build_model("rescal", 4, True, options={"p": 1})


@pytest.mark.parametrize("name", "rescal simple quate keci pairre triplere transr transr_l1".split())
def test_relations_are_compared_as_triples_are_scored(name):
    function, dim = SCORE_FUNCTIONS.get(name)(), fitting_dim(name, 6)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        heads, tails = random_rows(5, dim).to(dtype), random_rows(5, dim, 1).to(dtype)
        relations = random_rows(4, function.relation_dim(dim), 2).to(dtype)
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
    rows = [random_rows(3, dim), random_rows(3, dim, 1), random_rows(2, function.relation_dim(dim), 2)]
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
    [("rescal", False, Side.TAIL), ("rescal", False, Side.HEAD), ("rescal", True, Side.HEAD)]
    + [("complex", True, Side.TAIL), ("complex", False, Side.HEAD)],
)
def test_shared_rows_give_the_queries_of_own_rows(name, reciprocal, side):
    model = build_model(name, 12, reciprocal)
    entities, relations = (
        random_rows(*shape).requires_grad_() for shape in ((5, 12), (3, model.relation_width))
    )
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
    assert not KgeModel(Shifted(), 12, True).score_function.shares_relations
