"""Every operator of PyTorch-BigGraph with every comparator, against plain loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dglkge.errors import InputError
from dglkge.formats.operators import operator_of, pair_name, score_function_of
from dglkge.model.functions.bigraph_operators import OPERATORS
from dglkge.model.functions.bigraph_scores import COMPARATORS, NAMES, StaticPairs
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import RELATION, Side
from tests.model.bigraph_oracle import dynamic_score, static_score
from tests.model.rounding import check_bound

DIM = 6
PAIRS = {
    pair_name(operator, comparator, bias): (operator, comparator, bias)
    for operator, comparator, bias in itertools.product(OPERATORS, COMPARATORS, (False, True))
}
NEW = {name: pair for name, pair in PAIRS.items() if name in NAMES}
BY_OPERATOR = {operator: [name for name in NEW if PAIRS[name][0] == operator] for operator in OPERATORS}
"""The pairs without a name of their own, by operator: 8, less one or two."""

each_operator = pytest.mark.parametrize("names", BY_OPERATOR.values(), ids=BY_OPERATOR)


def draw(name: str, reciprocal: bool, num_rows: int = 7, dtype: torch.dtype = torch.float64):
    """A model with random heads, relations and tails; relation i is equal to relation i + 4."""
    model = build_model(name, DIM, reciprocal)
    random = torch.Generator().manual_seed(0)
    widths = (DIM, model.relation_width, DIM)
    rows = [torch.randn(num_rows, width, generator=random, dtype=torch.float64).to(dtype) for width in widths]
    ids = torch.arange(num_rows) % 4
    rows[1] = rows[1][ids]
    return model, *rows, ids


def half(rows: torch.Tensor, side: Side) -> torch.Tensor:
    """The half of reciprocal rows that serves a side."""
    return rows.chunk(2, dim=1)[0 if side is Side.TAIL else 1]


def as_parameters(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows as PyTorch-BigGraph's operators have them: RESCAL's matrices are transposed there."""
    return rows.unflatten(1, (DIM, DIM)).mT.flatten(1) if name == "rescal" else rows


def test_all_pairs_have_a_name():
    declared = [operator_of(name) for name in PAIRS]
    assert len(PAIRS) == 48
    assert set(PAIRS.values()) == {(pair.name, pair.comparator, pair.bias) for pair in declared}
    assert all(score_function_of(*pair) == name for name, pair in PAIRS.items())
    assert len(NEW) == 44 and len(SCORE_FUNCTIONS) < 44 and "affine_cos" not in list(SCORE_FUNCTIONS)
    assert "translation_l2" not in SCORE_FUNCTIONS and "linear_dot" not in SCORE_FUNCTIONS
    assert {"transe_l2", "distmult", "complex", "rescal"} <= set(PAIRS)
    with pytest.raises(InputError, match="unknown score function 'linear'"):
        SCORE_FUNCTIONS.get("linear")


@pytest.mark.parametrize("operator", OPERATORS)
def test_dynamic_scores_equal_plain_loops(operator):
    names = [name for name, pair in PAIRS.items() if pair[0] == operator]
    for name, side in itertools.product(names, Side):
        model, heads, relations, tails, ids = draw(name, reciprocal=True)
        anchors, answers = (heads, tails) if side is Side.TAIL else (tails, heads)
        query = model.query(anchors, relations, side, ids)
        expected = [
            [dynamic_score(PAIRS[name], x.tolist(), r.tolist(), y.tolist()) for y in answers]
            for x, r in zip(anchors, as_parameters(name, half(relations, side)))
        ]
        np.testing.assert_allclose(model.compare(query, answers).numpy(), expected, rtol=1e-9, atol=1e-9)
        pairs = model.compare_pairs(query, answers)
        np.testing.assert_allclose(pairs.numpy(), np.diagonal(expected), rtol=1e-9)


@each_operator
def test_static_scores_equal_plain_loops(names):
    for name, side, with_ids in itertools.product(names, Side, [True, False]):
        model, heads, relations, tails, ids = draw(name, reciprocal=False)
        anchors, answers = (heads, tails) if side is Side.TAIL else (tails, heads)
        query = model.query(anchors, relations, side, ids if with_ids else None)
        assert query.shape == (7, model.query_dim)
        expected = [
            [
                static_score(PAIRS[name], *([x, r, y] if side is Side.TAIL else [y, r, x]))
                for y in answers.tolist()
            ]
            for x, r in zip(anchors.tolist(), relations.tolist())
        ]
        for compare in (model.compare, model.compare_plainly):
            np.testing.assert_allclose(compare(query, answers).numpy(), expected, rtol=1e-9, atol=1e-9)
        pairs = model.compare_pairs(query, answers)
        np.testing.assert_allclose(pairs.numpy(), np.diagonal(expected), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(model.compare(query[:0], answers).numpy(), np.empty((0, 7)))
        scores = model.score(heads, relations, tails, side)
        np.testing.assert_allclose(scores.numpy(), np.diagonal(expected), rtol=1e-9, atol=1e-9)


@each_operator
def test_relations_of_a_pair_of_entities(names):
    """Relation prediction: (h, ?, t) against every relation."""
    for name, reciprocal in itertools.product(names, (False, True)):
        model, heads, relations, tails, _ = draw(name, reciprocal)
        function, rows = model.score_function, relations
        score = static_score
        if reciprocal:
            rows, score = half(relations, Side.TAIL), dynamic_score
        scores = function.compare_relations(function.relation_query(heads[:3], tails[:3]), rows)
        expected = [
            [score(PAIRS[name], h, r, t) for r in rows.tolist()]
            for h, t in zip(heads[:3].tolist(), tails[:3].tolist())
        ]
        np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-9, atol=1e-9)


@each_operator
def test_gradients(names):
    """Also of relations with equal rows and different ids, which every run starts with.

    Along a random direction (``fast_mode``): a wrong entry shows there as well.
    """
    kinds = itertools.cycle(itertools.product([False, True], Side))  # each with some comparators
    for name, (reciprocal, side) in zip(names, kinds):
        model, heads, relations, tails, ids = draw(name, reciprocal, num_rows=5)
        rows = [row.detach().requires_grad_() for row in (heads, relations, tails[:3])]

        def matrix(anchor, relation, candidates, model=model, side=side, ids=ids, shared=not reciprocal):
            relations = relation[ids] if shared else relation
            return model.compare(model.query(anchor, relations, side, ids), candidates)

        def pairs(anchor, relation, candidates, model=model, side=side, ids=ids):
            return model.compare_pairs(model.query(anchor[:3], relation[:3], side, ids[:3]), candidates)

        assert torch.autograd.gradcheck(matrix, rows, fast_mode=True)
        assert torch.autograd.gradcheck(pairs, rows, fast_mode=True)
        with torch.no_grad():
            rows[1][:] = rows[1][0]
        assert torch.autograd.gradcheck(matrix, rows, fast_mode=True)


@each_operator
def test_beyond_the_bound_float32_is_right(names):
    """Each candidate in turn is the true answer; all others are compared with it."""
    kinds = [
        (False, Side.TAIL, 1.0),
        (False, Side.HEAD, 1.0),
        (True, Side.TAIL, 1.0),
        (False, Side.TAIL, 1e-6),
        (False, Side.TAIL, 1e4),
    ]
    for name, (reciprocal, side, scale) in itertools.product(names, kinds):
        model, *rows, ids = draw(name, reciprocal, num_rows=30, dtype=torch.float32)
        anchors, relations, tails = rows[0] * scale, rows[1], rows[2] * scale
        # Near ties: rows that differ by rounding only, and by little.
        candidates = torch.cat([tails, tails * (1 + 2**-22), tails + 1e-6 * scale, tails * 0])
        query = model.query(anchors[:6].double(), relations[:6].double(), side, ids[:6])
        num_close = check_bound(model.score_function, query, candidates)
        if scale == 1.0 and not name.endswith("l2_bias"):
            assert num_close < 0.2 * 6 * len(candidates) ** 2


@each_operator
def test_relations_start_as_the_identity(names):
    for name, reciprocal in itertools.product(names, [False, True]):
        model, heads, _, tails, _ = draw(name, reciprocal)
        rows = model.initial_rows(RELATION, torch.arange(7), seed=1, scale=1e-3)
        assert rows.shape == (7, model.relation_width) and rows.dtype == torch.float32
        _, comparator, bias = PAIRS[name]
        for side in Side:
            anchors, answers = (heads, tails) if side is Side.TAIL else (tails, heads)
            scores = model.compare(model.query(anchors, rows.double(), side), answers)
            expected = [
                [static_score(("none", comparator, bias), x, [], y) for y in answers.tolist()]
                for x in anchors.tolist()
            ]
            np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_0(bias):
    """PyTorch-BigGraph's cosine is not a number there; here it is 0, and so are the gradients."""
    model = build_model(pair_name("diagonal", "cos", bias), 4, False)
    rows = torch.zeros(2, 4, requires_grad=True)
    relations = torch.ones(2, 4, requires_grad=True)
    scores = model.compare(model.query(rows, relations, Side.TAIL), torch.ones(3, 4))
    assert scores.tolist() == [[float(bias)] * 3] * 2
    scores.sum().backward()
    expected = [3.0 * bias, 0, 0, 0]
    assert rows.grad.tolist() == [expected] * 2 and torch.isfinite(relations.grad).all()


def test_products_stay_products():
    """The compiled path over all candidates takes plain inner products of rows."""
    for reciprocal in (False, True):
        for name in ("none_dot", "rescal"):
            model = build_model(name, DIM, reciprocal)
            assert type(model.score_function).compare is SCORE_FUNCTIONS.get("distmult").compare
            assert model.query_dim == DIM
    assert isinstance(build_model("affine_cos", DIM, False).score_function, StaticPairs)
    assert build_model("affine_dot_bias", DIM, False).query_dim == DIM + 1
    assert build_model("affine_dot_bias", DIM, True).query_dim == DIM


SEVERAL = "+".join(OPERATORS)
SEVERAL_NAMES = [f"{SEVERAL}_{end}" for end in ("dot", "cos", "l2", "squared_l2", "dot_bias", "l2_bias")]


def draw_several(name: str, reciprocal: bool):
    """A model with random rows; relation i has operator i, and the last one that of relation 0."""
    operators = [*OPERATORS, *list(OPERATORS)[:1]]
    model, heads, _, tails, _ = draw(name, reciprocal)
    relations = model.operator_rows(operators).double()
    halves = relations.chunk(2, dim=1) if reciprocal else [relations]
    generator = torch.Generator().manual_seed(1)
    for rows in halves:
        for row, operator in zip(rows, operators):
            width = OPERATORS[operator].row_dim(DIM) if operator != "none" else 0
            row[:width] = torch.randn(width, generator=generator, dtype=torch.float64)
    return model, heads, relations, tails, operators


@pytest.mark.parametrize("name", SEVERAL_NAMES)
def test_several_operators_score_and_differentiate_as_each_relations_own(name):
    comparator, bias = name.removeprefix(f"{SEVERAL}_").removesuffix("_bias"), name.endswith("_bias")
    for reciprocal, side in itertools.product((False, True), Side):
        model, heads, relations, tails, operators = draw_several(name, reciprocal)
        anchors, answers = (heads, tails) if side is Side.TAIL else (tails, heads)
        rows = half(relations, side) if reciprocal else relations
        expected = []
        for x, row, operator in zip(anchors.tolist(), rows.tolist(), operators):
            r = row[: OPERATORS[operator].row_dim(DIM)]
            if reciprocal:
                scores = [dynamic_score((operator, comparator, bias), x, r, y) for y in answers.tolist()]
            else:
                ends = [(x, y) if side is Side.TAIL else (y, x) for y in answers.tolist()]
                scores = [static_score((operator, comparator, bias), h, r, t) for h, t in ends]
            expected.append(scores)

        def matrix(anchors, relations, answers, model=model, side=side):
            return model.compare(model.query(anchors, relations, side, torch.arange(7) % 6), answers)

        scores = matrix(anchors, relations, answers)
        np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-9, atol=1e-9)
        pairs = model.compare_pairs(model.query(anchors, relations, side), answers)
        np.testing.assert_allclose(pairs.numpy(), np.diagonal(expected), rtol=1e-9, atol=1e-9)
        leaves = [leaf.clone().requires_grad_() for leaf in (anchors, relations, answers)]
        (matrix(*leaves) * torch.linspace(-1, 1, 49).view(7, 7)).sum().backward()
        halves = leaves[1].grad.chunk(2, dim=1) if reciprocal else [leaves[1].grad]
        for gradients in halves:  # neither padding nor number moves
            for gradient, operator in zip(gradients, operators):
                width = OPERATORS[operator].row_dim(DIM) if operator != "none" else 0
                assert not gradient[width:].any()


def test_names_of_several_operators():
    for name in ("linear+linear_dot", "linear+_dot", "linear+cp_dot", "linear+none", "linear+none_l1"):
        assert name not in SCORE_FUNCTIONS
    with pytest.raises(InputError, match="the dimension must be even"):
        build_model("none+complex_diagonal_dot", 5, True)


def test_dimensions():
    for name, (operator, _, bias) in NEW.items():
        if operator == "complex_diagonal":
            with pytest.raises(InputError, match=r"the dimension must be even .*, got 5"):
                build_model(name, 5, False)
        elif bias:
            with pytest.raises(InputError, match=r"at least 2 \(one number is the bias\), got 1"):
                build_model(name, 1, True)
        else:
            build_model(name, 5, False)
