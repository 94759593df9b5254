"""The compiled loops of a batch's queries against torch's autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.embeddings.row_lookup import FoundRows
from dglkge.kernels import dot as dot_kernels
from dglkge.kernels.rows import narrow, widen
from dglkge.model.functions.autograd import words
from dglkge.model.kge_model import build_model
from dglkge.typing import Side
from tests.model.regularizer_by_name import build_regularizer

NUM, DIM, NUM_ENTITIES, NUM_RELATIONS = 9, 12, 6, 4

# Other tests compare whole batches, with every regularizer; here some rows have come from elsewhere.
MODELS = [("distmult", False), ("complex", True)]


def scattered(rows: np.ndarray, ids: np.ndarray) -> FoundRows:
    """Return rows of an array as if some of them had come from elsewhere."""
    is_local = np.arange(len(rows)) % 3 > 0
    places = np.where(is_local, np.cumsum(is_local) - 1, -np.cumsum(~is_local))
    return FoundRows.in_either(rows[is_local], rows[~is_local], places[ids])


class Case:
    """Tables, the rows of a batch in them (some twice), and everything that the loops write."""

    def __init__(self, score_function: str, reciprocal: bool) -> None:
        self.model = build_model(score_function, DIM, reciprocal)
        self.operator = (self.model.score_function.complex_valued, reciprocal)
        draw = np.random.default_rng(3)
        self.entities = draw.normal(size=(NUM_ENTITIES, DIM)).astype(np.float32)
        self.entities[2] = 0  # N3 has a gradient there too
        self.relations = draw.normal(size=(NUM_RELATIONS, self.model.relation_width)).astype(np.float32)
        self.heads, self.tails = draw.integers(0, NUM_ENTITIES, (2, NUM))
        self.heads[0], self.tails[1] = 2, self.heads[1]
        self.relation_rows = draw.integers(0, NUM_RELATIONS, NUM)
        self.found = (
            scattered(self.entities, self.heads),
            scattered(self.entities, self.tails),
            scattered(self.relations, self.relation_rows),
        )
        self.rows = (tuple(found.addresses for found in self.found), self.operator)
        self.of_queries = draw.normal(size=(2 * NUM, DIM)).astype(np.float32)
        self.of_positive, self.of_own = draw.normal(size=(2, 2 * NUM)).astype(np.float32)
        self.of_scores = self.of_positive, self.of_own
        self.factors = draw.uniform(0.5, 2, NUM).astype(np.float32)

    def queries(self, dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """Run the forward loop: queries, scores of the true answers and of the own entities."""
        queries = torch.full((2 * NUM, DIM), torch.nan, dtype=dtype)
        positive, own = np.full((2, 2 * NUM), np.nan, np.float32)
        dot_kernels.make_queries(*self.rows, words(queries), positive, own)
        return queries, positive, own

    def expected(self) -> tuple[torch.Tensor, ...]:
        """Leaves (heads, tails, relations), queries and both scores in float64, by the model itself."""
        leaves = [
            torch.from_numpy(array[ids]).double().requires_grad_()
            for array, ids in (
                (self.entities, self.heads),
                (self.entities, self.tails),
                (self.relations, self.relation_rows),
            )
        ]
        heads, tails, relations = leaves
        queries, positive, own = [], [], []
        for side, anchors, truths in ((Side.TAIL, heads, tails), (Side.HEAD, tails, heads)):
            query = self.model.query(anchors, relations, side)
            queries.append(query)
            positive.append(self.model.compare_pairs(query, truths))
            own.append(self.model.compare_pairs(query, anchors))
        return (*leaves, torch.cat(queries), torch.cat(positive), torch.cat(own))


@pytest.mark.parametrize(("score_function", "reciprocal"), MODELS)
def test_queries_and_scores(score_function: str, reciprocal: bool) -> None:
    case = Case(score_function, reciprocal)
    *_, queries, positive, own = (tensor.detach() for tensor in case.expected())
    got, got_positive, got_own = case.queries(torch.float32)
    np.testing.assert_allclose(got, queries, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got_positive, positive, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got_own, own, rtol=1e-5, atol=1e-5)
    narrow_queries, same_positive, same_own = case.queries(torch.bfloat16)
    assert torch.equal(narrow_queries, got.bfloat16())
    assert np.array_equal(same_positive, got_positive) and np.array_equal(same_own, got_own)


@pytest.mark.parametrize(("score_function", "reciprocal"), MODELS)
def test_gradients_of_all_rows_and_the_penalty(score_function: str, reciprocal: bool) -> None:
    case, n3 = Case(score_function, reciprocal), 0.7
    *leaves, queries, positive, own = case.expected()
    total = (queries * torch.from_numpy(case.of_queries)).sum()
    total = total + (positive * torch.from_numpy(case.of_positive)).sum()
    total = total + (own * torch.from_numpy(case.of_own)).sum()
    regularizer = build_regularizer("n3", n3, complex_valued=case.operator[0])
    heads, tails, relations = leaves
    both = regularizer.of_queries(case.model, heads, relations, tails, Side.TAIL)
    both = both + regularizer.of_queries(case.model, tails, relations, heads, Side.HEAD)
    penalty = (both * torch.from_numpy(case.factors)).sum()
    (total + penalty).backward()
    gradients = [np.full(leaf.shape, np.nan, np.float32) for leaf in leaves]
    got = dot_kernels.write_gradients(
        *case.rows, case.of_queries, case.of_scores, case.factors, np.float32(n3), tuple(gradients)
    )
    assert got == pytest.approx(penalty.item(), rel=1e-5)
    for mine, leaf in zip(gradients, leaves):
        assert leaf.grad is not None
        np.testing.assert_allclose(mine, leaf.grad, rtol=2e-5, atol=2e-5)


def test_gradients_of_queries_may_come_in_bfloat16() -> None:
    case = Case("complex", True)
    narrow_rows = torch.from_numpy(case.of_queries).bfloat16()
    results = []
    for rows in (words(narrow_rows), narrow_rows.float().numpy()):
        gradients = [np.empty((NUM, width), np.float32) for width in (DIM, DIM, 2 * DIM)]
        dot_kernels.write_gradients(
            *case.rows, rows, case.of_scores, case.factors, np.float32(0.1), tuple(gradients)
        )
        results.append(gradients)
    for left, right in zip(*results):
        assert np.array_equal(left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_gathered_in_either_type(dtype: torch.dtype) -> None:
    table = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    numbers = np.array([6, 0, 0, 3])
    operand = torch.full((4, 5), torch.nan, dtype=dtype)
    rows = scattered(table.numpy(), numbers)
    dot_kernels.gather(rows.addresses, words(operand))
    assert torch.equal(operand, table[torch.from_numpy(numbers)].to(dtype))


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    draw = np.random.default_rng(0).integers(0, 1 << 32, 20000, dtype=np.uint32)
    halves = np.arange(0, 1 << 16, 7, dtype=np.uint32)
    ties = np.concatenate([halves << 16 | np.uint32(low) for low in (0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    numbers = np.concatenate([draw, ties]).astype(np.uint32).view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    got = np.array([narrow(number) for number in numbers], np.uint16)
    assert np.array_equal(got, words(torch.from_numpy(numbers).bfloat16()))
    assert np.isnan(widen(narrow(np.float32(np.nan))))
    assert [widen(narrow(np.float32(x))) for x in (np.inf, -np.inf, 1.5)] == [np.inf, -np.inf, 1.5]
