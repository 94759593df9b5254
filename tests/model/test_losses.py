"""Every loss against its formula in plain Python; ignored negatives; options."""

from __future__ import annotations

import math

import pytest
import torch

from dglkge.errors import InputError
from dglkge.model.losses import LOSSES, build_loss

POSITIVE = [1.5, -0.3, 0.0, 7.0]
NEGATIVE = [[0.5, -1.0, 2.0], [3.0, 0.1, -0.2], [0.0, 0.0, 0.0], [-5.0, 1.0, 6.5]]
IGNORED = [[False, False, False], [True, False, False], [False, True, True], [False, False, True]]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def softmax(positive, kept):
    return -math.log(math.exp(positive) / (math.exp(positive) + sum(math.exp(n) for n in kept)))


def logistic(positive, kept):
    return softplus(-positive) + sum(softplus(n) for n in kept) / len(kept)


def margin_ranking(positive, kept, margin=1.0):
    return sum(max(0.0, margin - positive + n) for n in kept) / len(kept)


def self_adversarial(positive, kept, margin=9.0, adversarial_temperature=1.0):
    beliefs = [math.exp(adversarial_temperature * n) for n in kept]
    log_sigmoid = [-softplus(margin + n) for n in kept]
    weighted = sum(belief / sum(beliefs) * term for belief, term in zip(beliefs, log_sigmoid))
    return softplus(-(margin + positive)) - weighted


def bce(positive, kept):
    return (softplus(-positive) + sum(softplus(n) for n in kept)) / (1 + len(kept))


def hinge(positive, kept, margin=1.0):
    return max(0.0, margin - positive) + sum(max(0.0, margin + n) for n in kept) / len(kept)


def squared(positive, kept):
    return (1 - positive) ** 2 + sum(n * n for n in kept) / len(kept)


CASES = [
    ("softmax", softmax, {}),
    ("logistic", logistic, {}),
    ("margin_ranking", margin_ranking, {}),
    ("margin_ranking", margin_ranking, {"margin": 0.25}),
    ("bce", bce, {}),
    ("hinge", hinge, {}),
    ("hinge", hinge, {"margin": 2.5}),
    ("squared", squared, {}),
    ("self_adversarial", self_adversarial, {}),
    ("self_adversarial", self_adversarial, {"margin": 2, "adversarial_temperature": 0.5}),
    ("self_adversarial", self_adversarial, {"margin": 0.0, "adversarial_temperature": 0}),
]


def tensors(dtype=torch.float64):
    positive = torch.tensor(POSITIVE, dtype=dtype, requires_grad=True)
    negative = torch.tensor(NEGATIVE, dtype=dtype, requires_grad=True)
    return positive, negative, torch.tensor(IGNORED)


@pytest.mark.parametrize("name, formula, options", CASES)
def test_equals_formula(name, formula, options):
    positive, negative, ignored = tensors()
    loss = build_loss(name, **options)
    expected = torch.tensor([formula(p, n, **options) for p, n in zip(POSITIVE, NEGATIVE)])
    torch.testing.assert_close(loss(positive, negative, None), expected, check_dtype=False)
    torch.testing.assert_close(loss(positive, negative), expected, check_dtype=False)
    kept = [[n for n, skip in zip(*pair) if not skip] for pair in zip(NEGATIVE, IGNORED)]
    expected = torch.tensor([formula(p, n, **options) for p, n in zip(POSITIVE, kept)])
    torch.testing.assert_close(loss(positive, negative, ignored), expected, check_dtype=False)


# A squared error also pulls a score back to its label.
@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"squared"}))
def test_better_positives_and_worse_negatives_never_cost_more(name):
    positive, negative, _ = tensors()
    build_loss(name)(positive, negative).sum().backward()
    assert (positive.grad <= 0).all() and (negative.grad >= 0).all()


def test_no_gradient_flows_through_self_adversarial_weights():
    negative = torch.tensor([[1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    positive = torch.zeros(1, dtype=torch.float64)
    build_loss("self_adversarial", margin=0.0)(positive, negative).sum().backward()
    weights = negative.detach().softmax(1)
    torch.testing.assert_close(negative.grad, weights * negative.detach().sigmoid())


def test_softmax_gradient_is_belief_minus_truth():
    positive, negative, _ = tensors()
    build_loss("softmax")(positive, negative).sum().backward()
    beliefs = torch.cat([positive[:, None], negative], dim=1).detach().softmax(1)
    torch.testing.assert_close(positive.grad, beliefs[:, 0] - 1)
    torch.testing.assert_close(negative.grad, beliefs[:, 1:])


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("softmx", {}, "unknown loss 'softmx'; did you mean 'softmax'"),
        ("softmax", {"margin": 1.0}, "the loss 'softmax' has no option 'margin'; its options: "),
        (
            "margin_ranking",
            {"gamma": 1.0},
            "the loss 'margin_ranking' has no option 'gamma'; its options: 'batch_reduction', ",
        ),
        ("self_adversarial", {"temperature": 1}, "'confidences', 'margin', 'adversarial_temperature'"),
        ("hinge", {"margin": 0}, "margin of the loss 'hinge' is 0; allowed: a number above 0"),
        ("margin_ranking", {"margin": 0}, "is 0; allowed: a number above 0"),
        ("self_adversarial", {"margin": -1.0}, "is -1.0; allowed: at least 0"),
        ("self_adversarial", {"adversarial_temperature": "hot"}, "is 'hot'; allowed: a number"),
        ("margin_ranking", {"margin": math.nan}, "is nan; allowed: a "),
    ],
)
def test_wrong_options(name, options, message):
    with pytest.raises(InputError) as error:
        build_loss(name, **options)
    assert message in str(error.value)
