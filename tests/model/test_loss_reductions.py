"""Every loss with every reduction, with labels and ignored negatives, against plain loops; its gradient."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from dglkge.model.losses import LOSSES, build_loss
from dglkge.model.negative_terms import Adversarial, Mean, Sum
from tests.model.test_losses import IGNORED, NEGATIVE, POSITIVE, softplus

LABELS = [1.0, 0.0, 0.25, 0.9]
TEMPERATURE = 0.7
REDUCTIONS = {"mean": Mean(), "sum": Sum(), "adversarial": Adversarial(TEMPERATURE)}

POINTWISE = {
    # loss of a true answer, of a false one
    "logistic": (lambda s: softplus(-s), softplus),
    "bce": (lambda s: softplus(-s), softplus),
    "hinge": (lambda s: max(0.0, 1.0 - s), lambda s: max(0.0, 1.0 + s)),
    "squared": (lambda s: (1.0 - s) ** 2, lambda s: s**2),
    "self_adversarial": (lambda s: softplus(-s - 9.0), lambda s: softplus(s + 9.0)),
}


def weights(kept: list[float], temperature: float) -> list[float]:
    powers = [math.exp(temperature * n) for n in kept]
    return [power / sum(powers) for power in powers]


def reduced(terms: list[float], kept: list[float], reduction: str, temperature: float) -> float:
    if reduction == "sum":
        return sum(terms)
    if reduction == "mean":
        return sum(terms) / len(terms)
    return sum(w * term for w, term in zip(weights(kept, temperature), terms))


def oracle(name: str, reduction: str, positive: float, kept: list[float], label: float | None) -> float:
    """Return the loss of one query, negatives and labels one by one."""
    if name == "softmax":
        shares = [1.0] * len(kept)
        if reduction == "adversarial":
            shares = [len(kept) * w for w in weights(kept, TEMPERATURE)]
        total = math.exp(positive) + sum(share * math.exp(n) for share, n in zip(shares, kept))
        return math.log(total) - positive
    if name == "margin_ranking":
        terms = [max(0.0, 1.0 - positive + n) for n in kept]
        return reduced(terms, kept, reduction, TEMPERATURE)
    if_true, if_false = POINTWISE[name]
    truth = if_true(positive)
    if label is not None and name == "squared":
        truth = (label - positive) ** 2
    elif label is not None:
        truth = label * if_true(positive) + (1 - label) * if_false(positive)
    terms = [if_false(n) for n in kept]
    if name == "self_adversarial":
        return truth + reduced(terms, kept, "adversarial", 1.0)
    if name == "bce" and reduction == "mean":
        return (truth + sum(terms)) / (1 + len(terms))
    return truth + reduced(terms, kept, reduction, TEMPERATURE)


def cases(name: str) -> list[tuple[str, bool]]:
    """Reductions of a loss, with labels and without."""
    options = LOSSES.get(name).Settings.model_fields
    needed = {"mean": "name", "sum": "reduction", "adversarial": "adversarial_weights"}
    return [
        (reduction, labeled)
        for reduction, labeled in itertools.product(REDUCTIONS, (False, True))
        if needed[reduction] in options and (not labeled or "confidences" in options)
    ]


each_loss = pytest.mark.parametrize("name", LOSSES)


def made(name: str, reduction: str):
    if name == "self_adversarial":
        return build_loss(name)  # its weights are no option
    options = {
        "mean": {},
        "sum": {"reduction": "sum"},
        "adversarial": {"adversarial_weights": True, "adversarial_temperature": TEMPERATURE},
    }
    return build_loss(name, **options[reduction])


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    kind = {"dtype": torch.float64, "requires_grad": True}
    return torch.tensor(POSITIVE, **kind), torch.tensor(NEGATIVE, **kind)


def test_the_cases_are_those_that_the_losses_declare() -> None:
    assert sum(len(cases(name)) for name in LOSSES) == 2 * 3 * 4 + 2 + 3 + 2
    without = {name for name in LOSSES if ("adversarial", False) not in cases(name)}
    assert without == {"self_adversarial"}


@each_loss
def test_equals_plain_loops(name: str) -> None:
    for (reduction, labeled), masked in itertools.product(cases(name), [False, True]):
        positive, negative = tensors()
        more = {"labels": torch.tensor(LABELS, dtype=torch.float64)} if labeled else {}
        ignored = torch.tensor(IGNORED) if masked else None
        losses = made(name, reduction)(positive, negative, ignored, **more)
        expected = []
        for i, row in enumerate(NEGATIVE):
            kept = [n for n, skip in zip(row, IGNORED[i]) if not (masked and skip)]
            expected.append(oracle(name, reduction, POSITIVE[i], kept, LABELS[i] if labeled else None))
        torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64))


@each_loss
def test_gradient_is_that_of_the_oracle_with_constant_weights(name: str) -> None:
    """Finite differences; scores are moved away from the corners of hinges, weights are held constant."""
    for reduction, labeled in cases(name):
        check_gradient(name, reduction, labeled)


def check_gradient(name: str, reduction: str, labeled: bool) -> None:
    positive, negative = tensors()
    ignored = torch.tensor(IGNORED)
    more = {"labels": torch.tensor(LABELS, dtype=torch.float64)} if labeled else {}
    loss = made(name, reduction)
    with torch.no_grad():
        positive += 0.0137
        negative += 0.0071
    if reduction != "adversarial" and name != "self_adversarial":
        assert torch.autograd.gradcheck(lambda p, n: loss(p, n, ignored, **more), (positive, negative))
        return
    # The weights of the scores as they are: given to the loss as numbers, so that differences do not move
    # them.
    temperature = 1.0 if name == "self_adversarial" else TEMPERATURE
    kept = negative.detach().masked_fill(ignored, -math.inf)
    constant = (temperature * kept).softmax(1)
    loss(positive, negative, ignored, **more).sum().backward()

    def held(p: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        if name == "softmax":
            shares = constant * (~ignored).sum(1, keepdim=True)
            return ((p.exp() + (shares * n.exp()).sum(1)).log() - p).sum()
        if name == "margin_ranking":
            return (constant * (1 - p[:, None] + n).relu()).sum()
        truth = made(name, "adversarial")(p, n, torch.ones_like(ignored), **more).sum()
        terms = {
            "logistic": torch.nn.functional.softplus(n),
            "bce": torch.nn.functional.softplus(n),
            "hinge": (1 + n).relu(),
            "squared": n.square(),
            "self_adversarial": torch.nn.functional.softplus(9 + n),
        }[name]
        return truth + (constant * terms).sum()

    for of, got in ((0, positive.grad), (1, negative.grad)):
        arguments = [positive.detach(), negative.detach()]
        numeric = torch.zeros_like(arguments[of])
        for place in range(numeric.numel()):
            values = []
            for step in (1e-6, -1e-6):
                moved = [argument.clone() for argument in arguments]
                moved[of].view(-1)[place] += step
                values.append(held(*moved))
            numeric.view(-1)[place] = (values[0] - values[1]) / 2e-6
        torch.testing.assert_close(got, numeric, rtol=1e-5, atol=1e-7)


@each_loss
def test_ignored_and_large_scores(name: str) -> None:
    """Everything stays finite, ignored scores have no gradient and do not matter."""
    kinds = itertools.product(cases(name), (1.0, 1e2, 1e6), (IGNORED, [[True] * 3] * 4))
    for (reduction, labeled), scale, ignored in kinds:
        more = {"labels": torch.tensor(LABELS)} if labeled else {}
        loss, mask = made(name, reduction), torch.tensor(ignored)
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
    "name", [name for name in LOSSES if "confidences" in LOSSES.get(name).Settings.model_fields]
)
def test_a_label_of_one_is_no_label(name: str) -> None:
    positive, negative = tensors()
    loss = build_loss(name)
    labeled = loss(positive, negative, None, labels=torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(labeled, loss(positive, negative, None), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", [name for name in LOSSES if "adversarial_weights" in LOSSES.get(name).Settings.model_fields]
)
def test_temperature_0_weighs_all_negatives_the_same(name: str) -> None:
    positive, negative = tensors()
    ignored = torch.tensor(IGNORED)
    loss = build_loss(name, adversarial_weights=True, adversarial_temperature=0.0)
    plain = build_loss("logistic" if name == "bce" else name)
    torch.testing.assert_close(loss(positive, negative, ignored), plain(positive, negative, ignored))


def test_a_subclass_states_its_own_settings() -> None:
    class Mine(LOSSES.get("logistic")):  # type: ignore[misc]
        pass

    assert "reduction" not in Mine.Settings.model_fields
