"""Every regularizer against its formula in plain Python, and its gradient at 0."""

from __future__ import annotations

import pytest
import torch

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.model.regularizers import REGULARIZERS, chosen_regularizer
from tests.model.regularizer_by_name import build_regularizer

ROWS = [[1.0, -2.0, 0.5, 3.0], [0.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 1.0, 2.0]]


def n3(row, p):
    return sum(abs(x) ** 3 for x in row)


def n3_complex(row, p):
    half = len(row) // 2
    return sum(abs(complex(a, b)) ** 3 for a, b in zip(row[:half], row[half:]))


def lp(row, p):
    return sum(abs(x) ** p for x in row)


@pytest.mark.parametrize(
    "name, formula, p, complex_valued",
    [
        ("n3", n3, 3.0, False),
        ("n3", n3_complex, 3.0, True),
        ("lp", lp, 1.0, False),
        ("lp", lp, 2.0, True),
        ("lp", lp, 3.0, False),
        ("lp", lp, 2.5, False),
    ],
)
def test_equals_formula(name, formula, p, complex_valued):
    rows = torch.tensor(ROWS, dtype=torch.float64)
    regularizer = build_regularizer(name, weight=0.7, p=p, complex_valued=complex_valued)
    expected = torch.tensor([0.7 * formula(row, p) for row in ROWS], dtype=torch.float64)
    torch.testing.assert_close(regularizer(rows), expected)
    torch.testing.assert_close(regularizer(rows.expand(2, 3, 4)), expected.expand(2, 3))


@pytest.mark.parametrize("name", sorted(REGULARIZERS))
@pytest.mark.parametrize("complex_valued", [False, True])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_gradient_is_finite_at_0(name, complex_valued, p):
    rows = torch.tensor(ROWS, requires_grad=True)
    build_regularizer(name, 1.0, p, complex_valued)(rows).sum().backward()
    assert torch.isfinite(rows.grad).all() and (rows.grad[1] == 0).all()


@pytest.mark.parametrize("name, complex_valued", [("n3", False), ("n3", True), ("lp", False)])
def test_gradcheck(name, complex_valued):
    rows = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(build_regularizer(name, 0.3, 3.0, complex_valued), rows)


@pytest.mark.parametrize(
    "name, weight, p, message",
    [
        ("n2", 1.0, 3.0, "unknown regularizer 'n2'; known: 'auto', 'dura', 'f2', 'ivr', 'lp', 'n3'"),
        ("n3", -0.1, 3.0, "weight of the regularizer 'n3' is -0.1; allowed: -1, or at least 0"),
        ("lp", 0.1, 0.5, "p of the regularizer 'lp' is 0.5; allowed: at least 1"),
    ],
)
def test_wrong_options(name, weight, p, message):
    with pytest.raises(InputError, match=message):
        build_regularizer(name, weight, p)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (("auto", -1, "complex"), ("dura", 0.01)),
        (("auto", -1, "rescal"), ("dura", 0.01)),
        (("auto", 0.3, "distmult"), ("dura", 0.3)),
        (("auto", -1, "transe_l2"), ("none", 0)),
        (("auto", -1, "rotate"), ("none", 0)),
        (("n3", -1, "rotate"), ("n3", 0.01)),
        (("n3", 0, "complex"), ("n3", 0)),
        (("none", -1, "complex"), ("none", 0)),
    ],
)
def test_a_weak_regularizer_by_default(given, chosen):
    name, weight, score_function = given
    values = {"name": name} if name == "none" else {"name": name, "weight": weight}
    config = load_config(
        None, ["dataset=d", *(f"regularizer.{key}={value}" for key, value in values.items())]
    )
    found = chosen_regularizer(config.regularizer, score_function)
    assert (found.name, getattr(found, "weight", 0)) == chosen


def test_message_about_an_unknown_name_lists_auto():
    with pytest.raises(InputError, match="'dur'; did you mean 'dura'.* known: 'auto', 'dura', 'f2'"):
        build_regularizer("dur", 0.1)
