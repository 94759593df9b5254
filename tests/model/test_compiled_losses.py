"""Losses by compiled loops against the losses themselves, by autograd in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from dglkge.model.compiled_losses import with_loops
from dglkge.model.losses import LOSSES as REGISTERED
from dglkge.model.losses import ConfidenceSettings, Softmax, build_loss
from dglkge.model.negative_terms import Adversarial, Mean, Sum


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


def draw(num_queries, num_negatives, scale, seed=0):
    random = torch.Generator().manual_seed(seed)
    positive = scale * torch.randn(num_queries, generator=random)
    negative = scale * torch.randn(num_queries, num_negatives, generator=random)
    return positive, negative, torch.rand(num_queries, num_negatives, generator=random) < 0.3


def values_and_gradients(loss, positive, negative, ignored, dtype):
    positive, negative = (one.detach().to(dtype).requires_grad_() for one in (positive, negative))
    found = loss(positive, negative, ignored)
    # Another weight for each query: a gradient that is summed over queries would show.
    weights = torch.arange(1, len(found) + 1, dtype=dtype)
    return [found, *torch.autograd.grad((found * weights).sum(), (positive, negative))]


@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_gradients_equal_autograd_in_float64(loss):
    for scale, shape in itertools.product(
        [0.01, 1.0, 30.0, 1000.0], [(1, 1), (7, 3), (5, 200), (3, 0), (0, 3)]
    ):
        positive, negative, ignored = draw(*shape, scale)
        for mask in (ignored, None):
            found = values_and_gradients(with_loops(loss), positive, negative, mask, torch.float32)
            expected = values_and_gradients(loss, positive, negative, mask, torch.float64)
            for got, wanted in zip(found, expected):
                assert got.dtype == torch.float32
                torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=2e-6 * max(scale, 1))


@pytest.mark.parametrize("loss", LOSSES)
def test_ignored_scores_do_not_count_whatever_they_are(loss):
    positive, negative, _ = draw(4, 10, 1.0)
    ignored = torch.zeros(4, 10, dtype=torch.bool)
    ignored[:, 3] = True
    ignored[2] = True
    changed = negative.clone()
    changed[:, 3] = torch.tensor([1e6, float("nan"), float("inf"), -5.0])
    loss_of, of_positive, of_negative = values_and_gradients(
        with_loops(loss), positive, changed, ignored, torch.float32
    )
    expected = values_and_gradients(with_loops(loss), positive, negative, ignored, torch.float32)
    torch.testing.assert_close([loss_of, of_positive, of_negative], expected, rtol=0, atol=0)
    assert (of_negative[ignored] == 0).all()
    # All negatives of query 2 are ignored: its loss is a number.
    assert loss_of.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
def test_scores_that_are_not_finite_show_in_the_loss(loss):
    for bad in [float("nan"), float("inf")]:
        positive, negative, _ = draw(3, 5, 1.0)
        negative[1, 2] = bad
        found = with_loops(loss)(positive, negative, None)
        assert found.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if isinstance(loss.settings, ConfidenceSettings)])
def test_confidences_of_true_answers(loss):
    positive, negative, ignored = draw(9, 20, 2.0)
    labels = torch.linspace(0, 1, 9)

    def call(function):
        return lambda one, two, mask: function(one, two, mask, labels.to(one.dtype))

    found = values_and_gradients(call(with_loops(loss)), positive, negative, ignored, torch.float32)
    expected = values_and_gradients(call(loss), positive, negative, ignored, torch.float64)
    for got, wanted in zip(found, expected):
        torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=4e-6)


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
