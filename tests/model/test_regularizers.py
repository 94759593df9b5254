"""Regularizers: penalties of rows and of queries."""

from __future__ import annotations

import itertools

import pytest
import torch

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.model.regularizers import REGULARIZERS, Regularizer, chosen_regularizer
from dglkge.typing import Side
from tests.model.penalty_oracle import query_penalty
from tests.model.regularizer_by_name import build_regularizer

DIM, NUM, WEIGHT = 6, 4, 0.7
MODELS = [("distmult", False), ("distmult", True), ("complex", False), ("complex", True)]
NAMES = ["f2", "dura", "ivr", "n3", "lp"]


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("dur", {}, "'dur'; did you mean 'dura'.* known: 'auto', 'dura', 'f2', 'ivr', 'lp', 'n3'"),
        ("n3", {"weight": -0.1}, "weight of the regularizer 'n3' is -0.1; allowed: -1, or at least 0"),
        ("lp", {"p": 0.5}, "p of the regularizer 'lp' is 0.5; allowed: at least 1"),
        ("lp", {"product_ratio": 2.0}, "the regularizer 'lp' has no option 'product_ratio'"),
        ("lp", {"entity_ratio": -1.0}, "entity_ratio of the regularizer 'lp' is -1.0; allowed: at least 0"),
    ],
)
def test_wrong_options(name, options, message):
    with pytest.raises(InputError, match=message):
        build_regularizer(name, **{"weight": 0.1, **options})


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (("auto", -1, "complex"), ("dura", 0.01)),
        (("auto", -1, "transe_l2"), ("none", 0)),
        (("n3", -1, "rotate"), ("n3", 0.01)),
        (("none", -1, "complex"), ("none", 0)),
    ],
)
def test_a_weak_regularizer_by_default(choice, expected):
    name, weight, score_function = choice
    values = [f"regularizer.name={name}", *([] if name == "none" else [f"regularizer.weight={weight}"])]
    config = load_config(None, ["dataset=d", *values])
    settings = chosen_regularizer(config.regularizer, score_function)
    assert (settings.name, getattr(settings, "weight", 0)) == expected


def draw(model: KgeModel) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(5)
    widths = (DIM, model.relation_width, DIM)
    return [torch.randn(NUM, width, generator=source, dtype=torch.float64) for width in widths]


def made(name: str, model: KgeModel, p: float, **ratios: float) -> Regularizer:
    return build_regularizer(name, WEIGHT, p, model.score_function.complex_valued, **ratios)


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_equal_the_formula(name: str) -> None:
    """Of queries, and of the rows of entities by themselves, with any leading dimensions."""
    for (score_function, reciprocal), side, p, has_ratios in itertools.product(
        MODELS, Side, [1.0, 2.0, 2.5, 3.0], [False, True]
    ):
        model = build_model(score_function, DIM, reciprocal)
        values = {"entity_ratio": 0.5, "relation_ratio": 0.0, "product_ratio": 3.0}
        fields = REGULARIZERS.get(name).Settings.model_fields
        ratios = {key: value for key, value in values.items() if has_ratios and key in fields}
        rows = anchors, relation_rows, answer = [row.requires_grad_() for row in draw(model)]
        regularizer = made(name, model, p, **ratios)
        penalties = regularizer.query_penalties(model, *rows, side)
        relations = relation_rows
        if reciprocal:
            relations = relation_rows[:, :DIM] if side is Side.TAIL else relation_rows[:, DIM:]
        options = {"is_complex": score_function == "complex" and name != "lp", "p": p, **ratios}
        options["is_turned"] = side is Side.HEAD and not reciprocal
        expected = WEIGHT * query_penalty(name, anchors, relations, answer, **options)
        torch.testing.assert_close(penalties, expected)
        slopes = torch.linspace(-1, 2, NUM, dtype=torch.float64)
        gradients = (torch.autograd.grad((values * slopes).sum(), rows) for values in (penalties, expected))
        torch.testing.assert_close(next(gradients), next(gradients))
        if name in ("f2", "dura", "n3"):  # parts without and of the answer are the whole
            without = regularizer.query_penalties(model, anchors, relation_rows, None, side)
            torch.testing.assert_close(without + regularizer(answer), penalties)
        zeros = torch.zeros_like(anchors), torch.zeros_like(relations)
        expected = WEIGHT * query_penalty(name, *zeros, answer, **options)
        torch.testing.assert_close(regularizer(answer), expected)
        torch.testing.assert_close(regularizer(answer.expand(2, *answer.shape)), expected.expand(2, NUM))


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_0_have_no_gradient(name: str) -> None:
    for p in (1.0, 2.0, 3.0):
        model = build_model("complex", DIM, True)
        rows = [torch.zeros_like(row).requires_grad_() for row in draw(model)]
        regularizer = made(name, model, p)
        (regularizer.query_penalties(model, *rows, Side.HEAD) + regularizer(rows[0])).sum().backward()
        assert all((row.grad == 0).all() for row in rows)


@pytest.mark.parametrize(("name", "num_penalized"), [("rotate", 0), ("transr", DIM)])
def test_phases_and_projections_are_left_alone(name: str, num_penalized: int) -> None:
    """Of a matrix of TransR and of angles; N3 of the other factors of each query, by hand."""
    model = build_model(name, DIM, False)
    rows = draw(model)
    is_complex = name == "rotate"
    regularizer = build_regularizer("n3", WEIGHT, complex_valued=is_complex)
    penalties = regularizer.query_penalties(model, *rows, Side.TAIL)
    factors = [row.unflatten(1, (2, -1)).norm(dim=1) if is_complex else row.abs() for row in rows[::2]]
    factors.append(rows[1][:, :num_penalized].abs())
    torch.testing.assert_close(penalties, WEIGHT * sum(row.pow(3).sum(1) for row in factors))
