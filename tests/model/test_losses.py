"""Every loss with every reduction, labels and ignored negatives, against plain loops; gradients; options."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from dglkge.errors import InputError
from dglkge.model.losses import LOSSES, build_loss

POSITIVE = [1.5, -0.3, 0.0, 7.0]
NEGATIVE = [[0.5, -1.0, 2.0], [3.0, 0.1, -0.2], [0.0, 0.0, 0.0], [-5.0, 1.0, 6.5]]
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


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def pointwise(name: str, margin: float) -> Any:
    """Loss of a true answer, and of a false one."""
    return {
        "logistic": (lambda s: softplus(-s), softplus),
        "bce": (lambda s: softplus(-s), softplus),
        "hinge": (lambda s: max(0.0, margin - s), lambda s: max(0.0, margin + s)),
        "squared": (lambda s: (1.0 - s) ** 2, lambda s: s**2),
        "self_adversarial": (lambda s: softplus(-s - margin), lambda s: softplus(s + margin)),
    }[name]


def weights(kept: list[float], temperature: float) -> list[float]:
    powers = [math.exp(temperature * n) for n in kept]
    return [power / sum(powers) for power in powers]


def reduced(terms: list[float], kept: list[float], reduction: str, temperature: float) -> float:
    if reduction == "sum":
        return sum(terms)
    if reduction == "mean":
        return sum(terms) / len(terms)
    return sum(w * term for w, term in zip(weights(kept, temperature), terms))


def oracle(
    name: str, reduction: str, options: dict, positive: float, kept: list[float], label: float | None
) -> float:
    """Return the loss of one query, negatives and labels one by one."""
    margin = options.get("margin", 9.0 if name == "self_adversarial" else 1.0)
    if name == "softmax":
        shares = [1.0] * len(kept)
        if reduction == "adversarial":
            shares = [len(kept) * w for w in weights(kept, TEMPERATURE)]
        total = math.exp(positive) + sum(share * math.exp(n) for share, n in zip(shares, kept))
        return math.log(total) - positive
    if name == "margin_ranking":
        return reduced([max(0.0, margin - positive + n) for n in kept], kept, reduction, TEMPERATURE)
    if_true, if_false = pointwise(name, margin)
    truth = if_true(positive)
    if label is not None and name == "squared":
        truth = (label - positive) ** 2
    elif label is not None:
        truth = label * if_true(positive) + (1 - label) * if_false(positive)
    terms = [if_false(n) for n in kept]
    if name == "self_adversarial":
        return truth + reduced(terms, kept, "adversarial", options.get("adversarial_temperature", 1.0))
    if name == "bce" and reduction == "mean":
        return (truth + sum(terms)) / (1 + len(terms))
    return truth + reduced(terms, kept, reduction, TEMPERATURE)


def cases(name: str) -> list[tuple[str, bool]]:
    fields = LOSSES.get(name).Settings.model_fields
    return [
        (reduction, labeled)
        for reduction, labeled in itertools.product(REDUCTIONS, (False, True))
        if REDUCTIONS[reduction].keys() <= fields.keys() and (not labeled or "confidences" in fields)
    ]


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    kind: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
    return torch.tensor(POSITIVE, **kind), torch.tensor(NEGATIVE, **kind)


def test_the_cases_are_those_that_the_losses_declare() -> None:
    assert sum(len(cases(name)) for name in LOSSES) == 2 * 3 * 4 + 2 + 3 + 2
    without = {name for name in LOSSES if ("adversarial", False) not in cases(name)}
    assert without == {"self_adversarial"}


@each_loss
def test_equals_plain_loops(name: str) -> None:
    kinds = itertools.product(cases(name), OPTIONS.get(name, [{}]), [False, True])
    for (reduction, labeled), options, masked in kinds:
        positive, negative = tensors()
        more = {"labels": torch.tensor(LABELS, dtype=torch.float64)} if labeled else {}
        loss = build_loss(name, **REDUCTIONS[reduction], **options)
        losses = loss(positive, negative, *([torch.tensor(IGNORED)] if masked else []), **more)
        expected = []
        for i, row in enumerate(NEGATIVE):
            kept = [n for n, skip in zip(row, IGNORED[i]) if not (masked and skip)]
            label = LABELS[i] if labeled else None
            expected.append(oracle(name, reduction, options, POSITIVE[i], kept, label))
        torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    "name, reduction, labeled", [(name, *case) for name in LOSSES for case in cases(name)]
)
def test_gradient_is_that_of_the_oracle_with_constant_weights(name, reduction, labeled):
    """Finite differences; scores are moved away from the corners of hinges."""
    positive, negative = tensors()
    ignored = torch.tensor(IGNORED)
    more = {"labels": torch.tensor(LABELS, dtype=torch.float64)} if labeled else {}
    loss = build_loss(name, **REDUCTIONS[reduction])
    with torch.no_grad():
        positive += 0.0137
        negative += 0.0071
    if reduction != "adversarial" and name != "self_adversarial":
        assert torch.autograd.gradcheck(lambda p, n: loss(p, n, ignored, **more), (positive, negative))
        return
    # The weights as they are, so that differences do not move them.
    temperature = 1.0 if name == "self_adversarial" else TEMPERATURE
    constant = (temperature * negative.detach().masked_fill(ignored, -math.inf)).softmax(1)
    loss(positive, negative, ignored, **more).sum().backward()

    def held(p: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        if name == "softmax":
            shares = constant * (~ignored).sum(1, keepdim=True)
            return ((p.exp() + (shares * n.exp()).sum(1)).log() - p).sum()
        if name == "margin_ranking":
            return (constant * (1 - p[:, None] + n).relu()).sum()
        truth = loss(p, n, torch.ones_like(ignored), **more).sum()
        terms = {"hinge": (1 + n).relu(), "squared": n.square()}.get(
            name, torch.nn.functional.softplus(n + 9 * (name == "self_adversarial"))
        )
        return truth + (constant * terms).sum()

    class Held(torch.autograd.Function):
        """The loss with constant weights, and the gradients of the loss itself."""

        @staticmethod
        def forward(ctx: Any, p: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return held(p, n)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return grad * positive.grad, grad * negative.grad

    assert torch.autograd.gradcheck(Held.apply, (positive, negative), atol=1e-7, rtol=1e-5)


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


def test_a_subclass_states_its_own_settings() -> None:
    class Mine(LOSSES.get("logistic")):  # type: ignore[misc]
        pass

    assert "reduction" not in Mine.Settings.model_fields


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("softmx", {}, "unknown loss 'softmx'; did you mean 'softmax'"),
        ("softmax", {"margin": 1.0}, "the loss 'softmax' has no option 'margin'; its options: "),
        ("self_adversarial", {"temperature": 1}, "'confidences', 'margin', 'adversarial_temperature'"),
        ("hinge", {"margin": 0}, "margin of the loss 'hinge' is 0; allowed: a number above 0"),
        ("margin_ranking", {"margin": 0}, "is 0; allowed: a number above 0"),
        ("self_adversarial", {"margin": -1.0}, "is -1.0; allowed: at least 0"),
        ("self_adversarial", {"adversarial_temperature": "hot"}, "is 'hot'; allowed: a number"),
        ("margin_ranking", {"margin": math.nan}, "is nan; allowed: a "),
    ],
)
def test_wrong_options(name, options, message):
    with pytest.raises(InputError, match=message):
        build_loss(name, **options)
