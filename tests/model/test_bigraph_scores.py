"""Every operator of PyTorch-BigGraph with every comparator, against plain loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dglkge.errors import InputError
from dglkge.formats.operators import operator_of, pair_name, score_function_of
from dglkge.model.functions.bigraph_operators import OPERATORS
from dglkge.model.functions.bigraph_scores import COMPARATORS
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import RELATION, Side
from tests.model.dense_oracle import Row, numbers
from tests.model.rounding import check_bound
from tests.model.score_oracle import BIGRAPH_NAMES

DIM = 6
PAIRS = {
    pair_name(operator, comparator, bias): (operator, comparator, bias)
    for operator, comparator, bias in itertools.product(OPERATORS, COMPARATORS, (False, True))
}
NEW = {name: pair for name, pair in PAIRS.items() if name in BIGRAPH_NAMES}
# Those without a name of their own: 8, less one or two.
BY_OPERATOR = {operator: [name for name in NEW if PAIRS[name][0] == operator] for operator in OPERATORS}
each_operator = pytest.mark.parametrize("names", BY_OPERATOR.values(), ids=BY_OPERATOR)
KINDS = list(itertools.product((False, True), Side))  # reciprocal or not, and the side


def operated(operator: str, row: Row, entity: Row) -> Row:
    """Return g_r(x), the parameters of the operator being the numbers of the row in their order."""
    dim = len(entity)
    if operator == "none":
        return entity
    if operator == "translation":
        return entity + row
    if operator == "diagonal":
        return entity * row
    if operator == "complex_diagonal":
        product = numbers(entity) * numbers(row)
        return np.concatenate([product.real, product.imag])
    result = row[: dim * dim].reshape(dim, dim) @ entity
    return result + row[dim * dim :] if operator == "affine" else result


def static_score(pair: tuple[str, str, bool], *rows: Row) -> float:
    """Return c(h, g_r(t)) of head, relation and tail, the first numbers being biases where there are some."""
    operator, comparator, has_bias = pair
    left, row, right = (np.asarray(values, np.float64) for values in rows)
    right = operated(operator, row, right)
    bias = left[0] + right[0] if has_bias else 0.0
    left, right = left[has_bias:], right[has_bias:]
    if comparator in ("dot", "cos"):
        lengths = np.linalg.norm(left) * np.linalg.norm(right) if comparator == "cos" else 1.0
        return bias + (left @ right / lengths if lengths else 0.0)
    square = ((left - right) ** 2).sum()
    return bias - (square if comparator == "squared_l2" else np.sqrt(square))


def draw(name: str, reciprocal: bool, num_rows: int = 7, dtype: torch.dtype = torch.float64):
    """A model with random heads, relations and tails; relation i is equal to relation i + 4."""
    model = build_model(name, DIM, reciprocal)
    random = torch.Generator().manual_seed(0)
    widths = (DIM, model.relation_width, DIM)
    rows = [torch.randn(num_rows, width, generator=random, dtype=torch.float64).to(dtype) for width in widths]
    ids = torch.arange(num_rows) % 4
    rows[1] = rows[1][ids]
    return model, *rows, ids


def score_matrix(pairs, reciprocal: bool, side: Side, anchors, rows, answers) -> np.ndarray:
    """The scores of query i, by pair i and its parameters, and each answer; dynamic where reciprocal."""
    scores = np.empty((len(anchors), len(answers)))
    for i, j in itertools.product(*map(range, scores.shape)):
        is_tail = side is Side.TAIL and not reciprocal
        head, tail = (anchors[i], answers[j]) if is_tail else (answers[j], anchors[i])
        scores[i, j] = static_score(pairs[i], head, rows[i], tail)
    return scores


def parameters(name: str, relations: torch.Tensor, reciprocal: bool, side: Side) -> torch.Tensor:
    """Rows as PyTorch-BigGraph's operators have them: RESCAL's matrices are transposed there."""
    rows = relations.chunk(2, dim=1)[0 if side is Side.TAIL else 1] if reciprocal else relations
    return rows.unflatten(1, (DIM, DIM)).mT.flatten(1) if name == "rescal" else rows


def test_all_pairs_have_a_name():
    declared = [operator_of(name) for name in PAIRS]
    assert set(PAIRS.values()) == {(pair.name, pair.comparator, pair.bias) for pair in declared}
    assert all(score_function_of(*pair) == name for name, pair in PAIRS.items())
    assert PAIRS.keys() - NEW.keys() == {"transe_l2", "distmult", "complex", "rescal"} and len(PAIRS) == 48
    unknown = "translation_l2 linear_dot linear linear+linear_dot linear+_dot linear+cp_dot linear+none_l1"
    assert [name for name in unknown.split() if name in SCORE_FUNCTIONS] == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_scores_equal_plain_loops(operator):
    """Also of (h, ?, t) against every relation."""
    names = [name for name, pair in PAIRS.items() if pair[0] == operator]
    for name, (reciprocal, side) in itertools.product(names, KINDS):
        model, heads, relations, tails, ids = draw(name, reciprocal)
        anchors, answers = (heads, tails) if side is Side.TAIL else (tails, heads)
        is_adjoint = name not in NEW and not reciprocal  # the row of the relation read backwards
        own_rows = model.score_function.adjoint(relations) if is_adjoint else relations
        rows = parameters(name, own_rows, reciprocal, side)
        expected = score_matrix([PAIRS[name]] * 7, reciprocal, side, anchors, rows, answers)
        for query_ids in (ids, None):
            query = model.query(anchors, relations, side, query_ids)
            assert query.shape == (7, model.query_dim)
            for compare in (model.compare, model.compare_plainly):
                np.testing.assert_allclose(compare(query, answers), expected, rtol=1e-9, atol=1e-9)
            pairs = model.compare_pairs(query, answers)
            np.testing.assert_allclose(pairs, np.diagonal(expected), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(model.compare(query[:0], answers), np.empty((0, 7)))
        scores = model.score(heads, relations, tails, side)
        np.testing.assert_allclose(scores, np.diagonal(expected), rtol=1e-9, atol=1e-9)
        if name in NEW and side is Side.TAIL:
            function = model.score_function
            scores = function.compare_relations(function.relation_query(heads[:3], tails[:3]), rows)
            for place, of_relations in enumerate(scores):
                triples = (heads[[place] * 7], rows, tails[[place]])
                expected = score_matrix([PAIRS[name]] * 7, reciprocal, side, *triples)
                np.testing.assert_allclose(of_relations, expected[:, 0], rtol=1e-9, atol=1e-9)


@each_operator
def test_gradients(names):
    """Also of relations with equal rows and different ids, which every run starts with."""
    for name, (reciprocal, side) in zip(names, itertools.cycle(KINDS)):  # each with some comparators
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
    kinds = [(False, Side.HEAD, 1.0), (True, Side.TAIL, 1.0)]
    kinds += [(False, Side.TAIL, scale) for scale in (1.0, 1e-6, 1e4)]
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
            pairs = [("none", comparator, bias)] * 7
            expected = score_matrix(pairs, True, side, anchors, [[]] * 7, answers)
            np.testing.assert_allclose(scores, expected, rtol=1e-9, atol=1e-12)


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


SEVERAL = "+".join(OPERATORS)
SEVERAL_NAMES = [f"{SEVERAL}_{end}" for end in ("dot", "cos", "l2", "squared_l2", "dot_bias", "l2_bias")]


@pytest.mark.parametrize("name", SEVERAL_NAMES)
def test_several_operators_score_and_differentiate_as_each_relations_own(name):
    """Relation i has operator i, and the last one that of relation 0."""
    comparator, bias = name.removeprefix(f"{SEVERAL}_").removesuffix("_bias"), name.endswith("_bias")
    operators = [*OPERATORS, *list(OPERATORS)[:1]]
    widths = [OPERATORS[operator].row_dim(DIM) if operator != "none" else 0 for operator in operators]
    for reciprocal, side in KINDS:
        model, heads, _, tails, _ = draw(name, reciprocal)
        relations, generator = model.operator_rows(operators).double(), torch.Generator().manual_seed(1)
        for rows in relations.chunk(1 + reciprocal, dim=1):
            for row, width in zip(rows, widths):
                row[:width] = torch.randn(width, generator=generator, dtype=torch.float64)
        anchors, answers = (heads, tails) if side is Side.TAIL else (tails, heads)
        operands = [
            row[: OPERATORS[operator].row_dim(DIM)]
            for row, operator in zip(parameters(name, relations, reciprocal, side), operators)
        ]
        pairs = [(operator, comparator, bias) for operator in operators]
        expected = score_matrix(pairs, reciprocal, side, anchors, operands, answers)

        def matrix(anchors, relations, answers, model=model, side=side):
            return model.compare(model.query(anchors, relations, side, torch.arange(7) % 6), answers)

        scores = matrix(anchors, relations, answers)
        np.testing.assert_allclose(scores, expected, rtol=1e-9, atol=1e-9)
        pair_scores = model.compare_pairs(model.query(anchors, relations, side), answers)
        np.testing.assert_allclose(pair_scores, np.diagonal(expected), rtol=1e-9, atol=1e-9)
        leaves = [leaf.clone().requires_grad_() for leaf in (anchors, relations, answers)]
        (matrix(*leaves) * torch.linspace(-1, 1, 49).view(7, 7)).sum().backward()
        for gradients in leaves[1].grad.chunk(1 + reciprocal, dim=1):  # neither padding nor number moves
            assert not any(gradient[width:].any() for gradient, width in zip(gradients, widths))


def test_dimensions():
    for name, (operator, _, has_bias) in {
        **NEW,
        "none+complex_diagonal_dot": ("complex_diagonal", "", 0),
    }.items():
        if operator == "complex_diagonal":
            with pytest.raises(InputError, match=r"the dimension must be even .*, got 5"):
                build_model(name, 5, True)
        elif has_bias:
            with pytest.raises(InputError, match=r"at least 2 \(one number is the bias\), got 1"):
                build_model(name, 1, True)
        else:
            build_model(name, 5, False)
