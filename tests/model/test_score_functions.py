"""Every score function against its scalar formula; both ways of comparing; both sides; its dimension."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.errors import InputError
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import Side
from tests.model.dense_oracle import DENSE, FORWARD_ONLY
from tests.model.score_oracle import ORACLES, fitting_dim, float64_score

NAMES = sorted(ORACLES)
DIM = 6


def has_wide_queries(name: str) -> bool:
    """Whether queries are wider than candidates."""
    return SCORE_FUNCTIONS.get(name)().query_dim(DIM) > DIM


def draw(name: str, num_rows: int = 7, dtype=torch.float64):
    """A score function with random heads, relations and tails, rows to rows."""
    random = torch.Generator().manual_seed(0)
    dim = fitting_dim(name, DIM)
    function = SCORE_FUNCTIONS.get(name)().bound(dim, 0)
    widths = (dim, function.relation_dim(dim), dim)
    rows = [torch.randn(num_rows, width, generator=random, dtype=torch.float64).to(dtype) for width in widths]
    return function, *rows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", list(Side))
def test_equals_scalar_formula(name, side):
    function, heads, relations, tails = draw(name)
    if side is Side.HEAD and name in FORWARD_ONLY:
        pytest.skip("it has no queries for heads without rows of their own")
    given, answers = (heads, tails) if side is Side.TAIL else (tails, heads)
    scores = function.compare_pairs(function.query(given, relations, side), answers)
    expected = [
        float64_score(name, *(row.tolist() for row in triple)) for triple in zip(heads, relations, tails)
    ]
    np.testing.assert_allclose(scores.detach().numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-7), (torch.float32, 2e-3)])
def test_matrix_and_pairs_agree(name, dtype, tolerance):
    function, heads, relations, tails = draw(name, dtype=dtype)
    query = function.query(heads, relations, Side.TAIL)
    # Of a wide query the first part is near what its answers are.
    candidates = torch.cat([tails, tails[:2], query[:2, : tails.shape[1]], tails * 0])
    matrix = function.compare(query, candidates)
    assert matrix.shape == (len(query), len(candidates)) and matrix.dtype == dtype
    for column, candidate in enumerate(candidates):
        pairs = function.compare_pairs(query, candidate.expand(len(query), -1))
        torch.testing.assert_close(matrix[:, column], pairs, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", list(Side))
def test_gradients(name, side):
    function, heads, relations, tails = draw(name)
    if side is Side.HEAD and name in FORWARD_ONLY:
        pytest.skip("it has no queries for heads without rows of their own")
    rows = [row.requires_grad_() for row in (heads, relations, tails[:4])]

    def matrix(given, relation, candidates):
        return function.compare(function.query(given, relation, side), candidates)

    def pairs(given, relation, candidates):
        return function.compare_pairs(function.query(given[:4], relation[:4], side), candidates)

    assert torch.autograd.gradcheck(matrix, rows)
    assert torch.autograd.gradcheck(pairs, rows)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_matrix_and_pairs_agree_in_float32(name):
    function, heads, relations, tails = draw(name, dtype=torch.float32)
    query = function.query(heads, relations, Side.TAIL).requires_grad_()
    by_matrix = torch.autograd.grad(function.compare(query, tails).diagonal().sum(), query)[0]
    by_pairs = torch.autograd.grad(function.compare_pairs(query, tails).sum(), query)[0]
    torch.testing.assert_close(by_matrix, by_pairs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if not has_wide_queries(name)])
def test_gradient_is_finite_at_distance_0(name):
    function, heads, *_ = draw(name, dtype=torch.float32)
    for scale in (0.0, 1e-20, 1.0, 1e3):
        rows = (heads * scale).requires_grad_()
        same = (heads * scale).requires_grad_()
        for compare in (function.compare, function.compare_pairs):
            grads = torch.autograd.grad(compare(rows, same).sum(), [rows, same])
            assert all(torch.isfinite(grad).all() for grad in grads)
            assert max(float(grad.abs().max()) for grad in grads) <= max(10.0, 10 * scale)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_broadcast(name):
    function, heads, relations, _ = draw(name)
    query = function.query(heads.unsqueeze(1), relations[:3], Side.TAIL)
    assert query.shape == (7, 3, function.query_dim(fitting_dim(name, DIM)))
    torch.testing.assert_close(query[2, 1], function.query(heads[2], relations[1], Side.TAIL))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in DENSE])
def test_reading_backwards_twice_changes_nothing(name):
    function, _, relations, _ = draw(name)
    torch.testing.assert_close(function.adjoint(function.adjoint(relations)), relations, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_dimension(name):
    function = SCORE_FUNCTIONS.get(name)()
    assert function.other_dims(4) == ""
    assert function.other_dims(0) == "a positive number"
    if function.complex_valued:
        assert function.other_dims(5) == "even (half real, half imaginary)"
    else:
        assert (function.other_dims(5) == "") == (fitting_dim(name, 5) == 5)


def test_which_are_complex_and_which_are_phases():
    complex_valued = {name for name in SCORE_FUNCTIONS if SCORE_FUNCTIONS.get(name).complex_valued}
    phases = {name for name in SCORE_FUNCTIONS if SCORE_FUNCTIONS.get(name).relation_init == "phase"}
    assert complex_valued == {"complex", "rotate", "conex"} and phases == {"rotate"}
    assert SCORE_FUNCTIONS.get("rotate")().relation_dim(8) == 4


class TestAsInBigGraph:
    """PyTorch-BigGraph's operators and comparators, from their documentation."""

    def test_translation_with_l2(self):
        function, lhs, relation, rhs = draw("transe_l2")
        expected = -((rhs - relation) - lhs).pow(2).sum(1).sqrt()
        static = -(lhs - (rhs + function.adjoint(relation))).pow(2).sum(1).sqrt()
        dynamic = function.compare_pairs(function.operate(lhs, relation), rhs)
        torch.testing.assert_close(static, expected)
        torch.testing.assert_close(dynamic, expected)

    def test_diagonal_with_dot(self):
        function, lhs, diagonal, rhs = draw("distmult")
        static = (lhs * (rhs * function.adjoint(diagonal))).sum(1)
        torch.testing.assert_close(function.compare_pairs(function.operate(lhs, diagonal), rhs), static)

    def test_complex_diagonal_with_dot(self):
        function, lhs, row, rhs = draw("complex")

        def complex_diagonal(embeddings, operator):
            real, imag = operator[:, : DIM // 2], operator[:, DIM // 2 :]
            real_a, imag_a = embeddings[:, : DIM // 2], embeddings[:, DIM // 2 :]
            return torch.cat([real_a * real - imag_a * imag, real_a * imag + imag_a * real], dim=1)

        torch.testing.assert_close(function.operate(lhs, row), complex_diagonal(lhs, row))
        static = (lhs * complex_diagonal(rhs, function.adjoint(row))).sum(1)
        torch.testing.assert_close(function.compare_pairs(function.operate(lhs, row), rhs), static)


def test_unknown_name():
    with pytest.raises(InputError, match="unknown score function 'ComplEx'.*did you mean 'complex'"):
        SCORE_FUNCTIONS.get("ComplEx")
