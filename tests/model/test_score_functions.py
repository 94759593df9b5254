"""Every score function against its formula; both ways of comparing; both sides; its dimension."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import Side
from tests.model.dense_oracle import DENSE, FORWARD_ONLY
from tests.model.score_oracle import ORACLES, fitting_dim, float64_score

NAMES = sorted(ORACLES)
DIM = 6


def has_wide_queries(name: str) -> bool:
    return SCORE_FUNCTIONS.get(name)().query_dim(DIM) > DIM


def draw(name: str, num_rows: int = 7, dtype=torch.float64):
    """A score function with random heads, relations and tails, rows to rows."""
    random = torch.Generator().manual_seed(0)
    dim = fitting_dim(name, DIM)
    function = SCORE_FUNCTIONS.get(name)().bound(dim, 0)
    widths = (dim, function.relation_dim(dim), dim)
    rows = [torch.randn(num_rows, width, generator=random, dtype=torch.float64).to(dtype) for width in widths]
    if function.has_times:
        # A module without a data set has one time.
        rows[1][:, -1] = 0 if function.has_module else torch.arange(num_rows).remainder(3)
    return function, *rows


each_function = pytest.mark.parametrize("name", NAMES)


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
        for column, candidate in enumerate(candidates):
            pairs = function.compare_pairs(query, candidate.expand(len(query), -1))
            torch.testing.assert_close(matrix[:, column], pairs, rtol=1e-5, atol=tolerance)


@each_function
def test_gradients(name):
    function, heads, relations, tails = draw(name)
    rows = [row.requires_grad_() for row in (heads, relations, tails[:4])]
    for side in [Side.TAIL] if name in FORWARD_ONLY else Side:

        def matrix(anchor, relation, candidates, side=side):
            return function.compare(function.query(anchor, relation, side), candidates)

        def pairs(anchor, relation, candidates, side=side):
            return function.compare_pairs(function.query(anchor[:4], relation[:4], side), candidates)

        assert torch.autograd.gradcheck(matrix, rows)
        assert torch.autograd.gradcheck(pairs, rows)


@pytest.mark.parametrize("name", [name for name in NAMES if not has_wide_queries(name)])
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
