"""Every loss with every reduction, labels and ignored negatives, against formulas of one query; options."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dglkge.errors import InputError
from dglkge.model.losses import LOSSES, build_loss

# No term of a hinge is at its corner.
POSITIVE = [1.4, -0.3, 0.0, 7.0]
NEGATIVE = [[0.5, -1.1, 2.0], [3.0, 0.1, -0.2], [0.0, 0.0, 0.0], [-5.0, 1.1, 6.5]]
IGNORED = [[False, False, False], [True, False, False], [False, True, True], [False, False, True]]
LABELS = [1.0, 0.0, 0.25, 0.9]
TEMPERATURE = 0.7
REDUCTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "adversarial": {"adversarial_weights": True, "adversarial_temperature": TEMPERATURE},
}
NEAR_0 = {"margin": 0.0, "adversarial_temperature": 0}
OPTIONS: dict[str, list[dict[str, float]]] = {
    "margin_ranking": [{}, {"margin": 0.25}],
    "hinge": [{}, {"margin": 2.5}],
    "self_adversarial": [{}, {"margin": 2, "adversarial_temperature": 0.5}, NEAR_0],
}
"""Options of a loss besides its reduction."""

each_loss = pytest.mark.parametrize("name", LOSSES)


def softplus(x: Tensor) -> Tensor:
    return x.exp().log1p()


def pointwise(name: str, margin: float) -> Any:
    """Loss of a true answer, and of a false one."""
    return {
        "logistic": (lambda s: softplus(-s), softplus),
        "bce": (lambda s: softplus(-s), softplus),
        "hinge": (lambda s: (margin - s).relu(), lambda s: (margin + s).relu()),
        "squared": (lambda s: (1.0 - s) ** 2, lambda s: s**2),
        "self_adversarial": (lambda s: softplus(-s - margin), lambda s: softplus(s + margin)),
    }[name]


def reduced(terms: Tensor, kept: Tensor, reduction: str, temperature: float) -> Tensor:
    """Reduce the terms of negatives; self-adversarial weights are constants."""
    if reduction == "adversarial":
        return (temperature * kept).detach().softmax(0) @ terms
    return terms.sum() if reduction == "sum" else terms.mean()


def oracle(
    name: str, reduction: str, options: dict, positive: Tensor, kept: Tensor, label: float | None
) -> Tensor:
    """Return the loss of one query, of which some negatives are kept; autograd differentiates it."""
    margin = options.get("margin", 9.0 if name == "self_adversarial" else 1.0)
    if name == "softmax":
        shares = torch.ones_like(kept)
        if reduction == "adversarial":
            shares = len(kept) * (TEMPERATURE * kept).detach().softmax(0)
        return (positive.exp() + shares @ kept.exp()).log() - positive
    if name == "margin_ranking":
        return reduced((margin - positive + kept).relu(), kept, reduction, TEMPERATURE)
    if_true, if_false = pointwise(name, margin)
    truth = if_true(positive)
    if label is not None and name == "squared":
        truth = (label - positive) ** 2
    elif label is not None:
        truth = label * if_true(positive) + (1 - label) * if_false(positive)
    terms = if_false(kept)
    if name == "self_adversarial":
        return truth + reduced(terms, kept, "adversarial", options.get("adversarial_temperature", 1.0))
    if name == "bce" and reduction == "mean":
        return (truth + terms.sum()) / (1 + len(terms))
    return truth + reduced(terms, kept, reduction, TEMPERATURE)


def cases(name: str) -> list[tuple[str, bool]]:
    fields = LOSSES.get(name).Settings.model_fields
    return [
        (reduction, labeled)
        for reduction, labeled in itertools.product(REDUCTIONS, (False, True))
        if REDUCTIONS[reduction].keys() <= fields.keys() and (not labeled or "confidences" in fields)
    ]


def tensors() -> tuple[Tensor, Tensor]:
    kind: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
    return torch.tensor(POSITIVE, **kind), torch.tensor(NEGATIVE, **kind)


def test_the_cases_are_those_that_the_losses_declare() -> None:
    assert sum(len(cases(name)) for name in LOSSES) == 2 * 3 * 4 + 2 + 3 + 2


@each_loss
def test_values_and_gradients_equal_the_formula(name: str) -> None:
    kinds = itertools.product(cases(name), OPTIONS.get(name, [{}]), [False, True])
    for (reduction, labeled), options, masked in kinds:
        scores = tensors()
        more = {"labels": torch.tensor(LABELS, dtype=torch.float64)} if labeled else {}
        loss = build_loss(name, **REDUCTIONS[reduction], **options)
        ignored = torch.tensor(IGNORED) & masked
        losses = loss(*scores, *([ignored] if masked else []), **more)
        labels = LABELS if labeled else [None] * len(LABELS)
        expected = torch.stack(
            [
                oracle(name, reduction, options, positive, negative[~mask], label)
                for positive, negative, mask, label in zip(*scores, ignored, labels)
            ]
        )
        torch.testing.assert_close(losses, expected)
        slopes = torch.tensor([1.0, -0.5, 2.0, 0.25], dtype=torch.float64)
        gradients, expected_gradients = (
            torch.autograd.grad((values * slopes).sum(), scores, materialize_grads=True)
            for values in (losses, expected)
        )
        torch.testing.assert_close(gradients, expected_gradients)


@each_loss
def test_ignored_and_large_scores(name: str) -> None:
    """Everything stays finite, ignored scores have no gradient and do not matter."""
    kinds = itertools.product(cases(name), (1.0, 1e2, 1e6), (IGNORED, [[True] * 3] * 4))
    for (reduction, labeled), scale, ignored in kinds:
        more = {"labels": torch.tensor(LABELS)} if labeled else {}
        loss, mask = build_loss(name, **REDUCTIONS[reduction]), torch.tensor(ignored)
        positive = torch.tensor(POSITIVE, requires_grad=True)
        negative = torch.tensor(NEGATIVE, requires_grad=True)
        losses = loss(positive * scale, negative * scale, mask, **more)
        losses.sum().backward()
        assert losses.shape == (4,) and torch.isfinite(losses).all()
        assert torch.isfinite(positive.grad).all() and torch.isfinite(negative.grad).all()
        assert (negative.grad[mask] == 0).all()
        changed = (negative * scale).masked_fill(mask, 1e7)
        torch.testing.assert_close(loss(positive * scale, changed, mask, **more), losses, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("softmax", {"margin": 1.0}, "the loss 'softmax' has no option 'margin'; its options: "),
        ("self_adversarial", {"temperature": 1}, "'confidences', 'margin', 'adversarial_temperature'"),
        ("hinge", {"margin": 0}, "margin of the loss 'hinge' is 0; allowed: a number above 0"),
        ("self_adversarial", {"margin": -1.0}, "is -1.0; allowed: at least 0"),
        ("margin_ranking", {"margin": math.nan}, "is nan; allowed: a "),
    ],
)
def test_wrong_options(name, options, message):
    with pytest.raises(InputError, match=message):
        build_loss(name, **options)
