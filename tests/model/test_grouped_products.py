"""Queries of relations that share their rows equal those of rows of their own, with all gradients."""

from __future__ import annotations

import pytest
import torch

from dglkge.model.functions.autograd import GroupedProducts
from dglkge.model.functions.bilinear import RESCAL
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.typing import Side

DIM = 6


@pytest.mark.parametrize(
    ("places", "transposed"), [([2, 0, 2, 1, 0, 2, 4], False), ([0, 0, 2], True), ([3], True), ([], False)]
)
def test_products_and_gradients_equal_a_batched_matmul(places, transposed):
    random = torch.Generator().manual_seed(0)
    where = torch.tensor(places, dtype=torch.int64)
    rows = torch.randn(len(places), 3, generator=random, dtype=torch.float64, requires_grad=True)
    shape = (5, 4, 3) if transposed else (5, 3, 4)
    matrices = torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True)
    turned = matrices.transpose(-1, -2) if transposed else matrices
    weights = torch.randn(len(places), 4, generator=random, dtype=torch.float64)
    products = GroupedProducts.apply(rows, turned, where)
    expected = (rows.unsqueeze(1) @ turned[where]).squeeze(1)
    torch.testing.assert_close(products, expected)
    gradients, expected_gradients = (
        torch.autograd.grad((values * weights).sum(), (rows, matrices)) for values in (products, expected)
    )
    torch.testing.assert_close(gradients, expected_gradients)


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
