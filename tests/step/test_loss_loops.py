"""Losses by compiled loops against the losses themselves, by autograd in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from dglkge.model.losses import LOSSES as REGISTERED
from dglkge.model.losses import ConfidenceSettings, Softmax, build_loss
from dglkge.model.negative_terms import Adversarial, Mean, Sum
from dglkge.step.objectives.scored_losses import with_loops


def reduced(name, reduction):
    loss = REGISTERED.get(name)()
    loss.reduction = reduction
    return loss


LOSSES = [
    *(reduced(name, Mean()) for name in REGISTERED if name != "self_adversarial"),
    *(reduced(name, Sum()) for name in REGISTERED if name not in ("self_adversarial", "softmax")),
    *(reduced(name, Adversarial(0.5)) for name in REGISTERED),
    reduced("softmax", Adversarial(0.0)),
    build_loss("self_adversarial", margin=0.0),
    build_loss("self_adversarial", margin=9.0, adversarial_temperature=0.5),
    build_loss("self_adversarial", margin=2.0, adversarial_temperature=0.0),
]


KINDS = {name: [loss for loss in LOSSES if type(loss) is REGISTERED.get(name)] for name in REGISTERED}
each_loss = pytest.mark.parametrize("losses", KINDS.values(), ids=KINDS)


def draw(num_queries, num_negatives, scale, seed=0):
    random = torch.Generator().manual_seed(seed)
    positive = scale * torch.randn(num_queries, generator=random)
    negative = scale * torch.randn(num_queries, num_negatives, generator=random)
    return positive, negative, torch.rand(num_queries, num_negatives, generator=random) < 0.3


def values_and_gradients(loss, positive, negative, ignored, dtype):
    positive, negative = (scores.detach().to(dtype).requires_grad_() for scores in (positive, negative))
    losses = loss(positive, negative, ignored)
    # Another weight for each query: a gradient that is summed over queries would show.
    weights = torch.arange(1, len(losses) + 1, dtype=dtype)
    return [losses, *torch.autograd.grad((losses * weights).sum(), (positive, negative))]


@each_loss
def test_values_and_gradients_equal_autograd_in_float64(losses):
    shapes = [(1, 1), (7, 3), (5, 200), (3, 0), (0, 3)]
    for loss, scale, shape in itertools.product(losses, [0.01, 1.0, 30.0, 1000.0], shapes):
        positive, negative, ignored = draw(*shape, scale)
        for mask in (ignored, None):
            computed = values_and_gradients(with_loops(loss), positive, negative, mask, torch.float32)
            expected = values_and_gradients(loss, positive, negative, mask, torch.float64)
            for got, true in zip(computed, expected):
                assert got.dtype == torch.float32
                torch.testing.assert_close(got.double(), true, rtol=2e-5, atol=2e-6 * max(scale, 1))


@each_loss
def test_ignored_scores_do_not_count_whatever_they_are(losses):
    positive, negative, _ = draw(4, 10, 1.0)
    ignored = torch.zeros(4, 10, dtype=torch.bool)
    ignored[:, 3] = True
    ignored[2] = True
    changed = negative.clone()
    changed[:, 3] = torch.tensor([1e6, float("nan"), float("inf"), -5.0])
    for loss in losses:
        computed, expected = (
            values_and_gradients(with_loops(loss), positive, scores, ignored, torch.float32)
            for scores in (changed, negative)
        )
        torch.testing.assert_close(computed, expected, rtol=0, atol=0)
        assert (computed[2][ignored] == 0).all()
        # All negatives of query 2 are ignored: its loss is a number.
        assert computed[0].isfinite().all()


@each_loss
def test_scores_that_are_not_finite_show_in_the_loss(losses):
    for loss, bad in itertools.product(losses, [float("nan"), float("inf")]):
        positive, negative, _ = draw(3, 5, 1.0)
        negative[1, 2] = bad
        values = with_loops(loss)(positive, negative, None)
        assert values.isfinite().tolist() == [True, False, True]


def test_confidences_of_true_answers():
    positive, negative, ignored = draw(9, 20, 2.0)
    labels = torch.linspace(0, 1, 9)
    weighed = [loss for loss in LOSSES if isinstance(loss.settings, ConfidenceSettings)]
    assert len(weighed) == 16
    for loss in weighed:
        computed, expected = (
            values_and_gradients(
                lambda positives, two, mask, of=of: of(positives, two, mask, labels.to(positives.dtype)),
                positive, negative, ignored, dtype,
            )
            for of, dtype in ((with_loops(loss), torch.float32), (loss, torch.float64))
        )  # fmt: skip
        for got, true in zip(computed, expected):
            torch.testing.assert_close(got.double(), true, rtol=2e-5, atol=4e-6)


def test_what_has_no_loops_goes_to_the_loss_itself():
    class Doubled(Softmax):
        def __call__(self, positive, negative, ignored=None):
            return 2 * super().__call__(positive, negative, ignored)

    positive, negative, ignored = draw(4, 6, 1.0)
    doubled = Doubled()
    assert with_loops(doubled) is doubled
    exact = with_loops(Softmax())(positive.double(), negative.double(), ignored)
    torch.testing.assert_close(
        exact, Softmax()(positive.double(), negative.double(), ignored), rtol=0, atol=0
    )
    assert exact.dtype == torch.float64


def test_every_loss_has_a_loop():
    assert all(REGISTERED.get(name).compiled for name in REGISTERED)
