"""Losses by compiled loops against the losses themselves, by autograd in float64; rounding to bfloat16."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dglkge.kernels.losses import softmax
from dglkge.kernels.rows import narrow, widen
from dglkge.model.functions.autograd import words
from dglkge.model.losses import LOSSES as REGISTERED
from dglkge.model.losses import ConfidenceSettings, Softmax, build_loss
from dglkge.model.negative_terms import IGNORED_SCORE, Adversarial, Mean, Sum
from dglkge.step.objectives.scored_losses import with_loops


def reduced(name, reduction):
    loss = REGISTERED.get(name)()
    loss.reduction = reduction
    return loss


def losses_of(name):
    if name == "self_adversarial":
        options = ((0.0, 1.0), (9.0, 0.5), (2.0, 0.0))
        own = [build_loss(name, margin=margin, adversarial_temperature=value) for margin, value in options]
        return [*own, reduced(name, Adversarial(0.5))]
    reductions = [Mean(), Adversarial(0.5), Adversarial(0.0) if name == "softmax" else Sum()]
    return [reduced(name, reduction) for reduction in reductions]


each_loss = pytest.mark.parametrize("name", REGISTERED)


def draw(num_queries, num_negatives, scale, seed=0):
    random = torch.Generator().manual_seed(seed)
    positive = scale * torch.randn(num_queries, generator=random)
    negative = scale * torch.randn(num_queries, num_negatives, generator=random)
    return positive, negative, torch.rand(num_queries, num_negatives, generator=random) < 0.3


def values_and_gradients(loss, positive, negative, ignored, dtype, labels=None):
    positive, negative = (scores.detach().to(dtype).requires_grad_() for scores in (positive, negative))
    losses = loss(positive, negative, ignored, *([] if labels is None else [labels.to(dtype)]))
    # Another weight for each query: a gradient that is summed over queries would show.
    weights = torch.arange(1, len(losses) + 1, dtype=dtype)
    return [losses, *torch.autograd.grad((losses * weights).sum(), (positive, negative))]


@each_loss
def test_values_and_gradients_equal_autograd_in_float64(name):
    shapes = [(1, 1), (7, 3), (5, 200), (3, 0), (0, 3)]
    for loss, scale, shape in itertools.product(losses_of(name), [0.01, 1.0, 30.0, 1000.0], shapes):
        positive, negative, ignored = draw(*shape, scale)
        labels = [torch.linspace(0, 1, shape[0])] if isinstance(loss.settings, ConfidenceSettings) else []
        by_loop = with_loops(loss)
        assert by_loop is not loss
        for mask, label in itertools.product((ignored, None), (None, *labels)):
            computed = values_and_gradients(by_loop, positive, negative, mask, torch.float32, label)
            expected = values_and_gradients(loss, positive, negative, mask, torch.float64, label)
            for got, true in zip(computed, expected):
                assert got.dtype == torch.float32
                torch.testing.assert_close(got.double(), true, rtol=2e-5, atol=2e-6 * max(scale, 1))


@each_loss
def test_ignored_scores_do_not_count_whatever_they_are(name):
    positive, negative, _ = draw(4, 10, 1.0)
    ignored = torch.zeros(4, 10, dtype=torch.bool)
    ignored[:, 3] = True
    ignored[2] = True
    changed = negative.clone()
    changed[:, 3] = torch.tensor([1e6, float("nan"), float("inf"), -5.0])
    for loss in losses_of(name):
        loops = with_loops(loss)
        computed = values_and_gradients(loops, positive, changed, ignored, torch.float32)
        expected = values_and_gradients(loops, positive, negative, ignored, torch.float32)
        torch.testing.assert_close(computed, expected, rtol=0, atol=0)
        assert (computed[2][ignored] == 0).all()
        # All negatives of query 2 are ignored: its loss is a number.
        assert computed[0].isfinite().all()


@each_loss
def test_scores_that_are_not_finite_show_in_the_loss_of_their_query(name):
    for loss, bad in itertools.product(losses_of(name), [float("nan"), float("inf")]):
        positive, negative, _ = draw(3, 5, 1.0)
        negative[1, 2] = bad
        for numbers in values_and_gradients(with_loops(loss), positive, negative, None, torch.float32):
            assert numbers[[0, 2]].isfinite().all()
        assert with_loops(loss)(positive, negative, None).isfinite().tolist() == [True, False, True]


def test_what_has_no_loops_goes_to_the_loss_itself():
    class Doubled(Softmax):
        def __call__(self, positive, negative, ignored=None):
            return 2 * super().__call__(positive, negative, ignored)

    positive, negative, ignored = draw(4, 6, 1.0)
    doubled = Doubled()
    assert with_loops(doubled) is doubled
    scores = positive.double(), negative.double(), ignored
    exact = with_loops(Softmax())(*scores)
    torch.testing.assert_close(exact, Softmax()(*scores), rtol=0, atol=0)
    assert exact.dtype == torch.float64


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 0.1), (torch.float32, 300.0), (torch.bfloat16, 3.0)]
)
def test_softmax_with_scores_of_own_entities_equals_autograd(dtype, scale):
    random, num = torch.Generator().manual_seed(5), 11
    scores = (torch.randn(num, 37, generator=random) * scale).to(dtype)
    positive, own_scores = (torch.randn(2, num, generator=random) * scale).numpy()
    scores[3, 4], scores[5] = IGNORED_SCORE, IGNORED_SCORE
    own_scores[3] = own_scores[5] = IGNORED_SCORE
    factors = torch.rand(num, generator=random).numpy()
    factors[7] = 0
    leaves = [torch.from_numpy(array).double().requires_grad_() for array in (positive, own_scores)]
    score_leaf = scores.double().requires_grad_()
    losses = Softmax()(leaves[0], torch.cat([score_leaf, leaves[1][:, None]], dim=1))
    expected = (losses * torch.from_numpy(factors)).sum()
    expected.backward()
    missing, own_shares, query_losses = np.full((3, num), np.nan, np.float32)
    numbers = (positive, own_scores, factors, missing, own_shares, factors, query_losses)
    assert softmax(np.float32(-1), words(scores), numbers) == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(query_losses, losses.detach(), rtol=1e-5)
    for mine, leaf in ((missing, leaves[0]), (own_shares, leaves[1])):
        np.testing.assert_allclose(mine, leaf.grad, rtol=1e-4, atol=2e-7)
    rough = 2**-8 if dtype == torch.bfloat16 else 1e-5
    np.testing.assert_allclose(scores.float(), score_leaf.grad, rtol=rough, atol=1e-20)
    assert not scores[5].any() and scores[3, 4] == 0


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << 32, 20000, dtype=np.uint32)
    halves = np.arange(0, 1 << 16, 7, dtype=np.uint32)
    ties = [halves << 16 | np.uint32(low) for low in (0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    numbers = np.concatenate([numbers, *ties]).view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    got = np.array([narrow(number) for number in numbers], np.uint16)
    assert np.array_equal(got, words(torch.from_numpy(numbers).bfloat16()))
    assert np.isnan(widen(narrow(np.float32(np.nan))))
    assert [widen(narrow(np.float32(x))) for x in (np.inf, -np.inf, 1.5)] == [np.inf, -np.inf, 1.5]
