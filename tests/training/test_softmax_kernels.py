"""Softmax and its gradient in one loop, and negatives that are the answer, against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.kernels.softmax import greatest_of, ignore_truths, power, softmax
from dglkge.model.functions.autograd import words
from dglkge.model.losses import Softmax
from dglkge.model.negative_terms import IGNORED_SCORE

NUM, NUM_NEGATIVES = 11, 37

NO_WEIGHTS = np.float32(-1)


def scores_of(scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray, np.ndarray, np.ndarray]:
    """Return scores (some ignored), positive and own scores, and factors."""
    draw = torch.Generator().manual_seed(5)
    scores = (torch.randn(NUM, NUM_NEGATIVES, generator=draw) * scale).to(dtype)
    positive, own = (torch.randn(2, NUM, generator=draw) * scale).numpy()
    scores[3, 4], scores[5] = IGNORED_SCORE, IGNORED_SCORE
    own[3] = own[5] = IGNORED_SCORE
    factors = torch.rand(NUM, generator=draw).numpy()
    factors[7] = 0
    return scores, positive, own, factors


@pytest.mark.parametrize("scale", [0.1, 3.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_equal_those_of_autograd(dtype: torch.dtype, scale: float) -> None:
    scores, positive, own, factors = scores_of(scale, dtype)
    leaves = [torch.from_numpy(array).double().requires_grad_() for array in (positive, own)]
    of_scores = scores.double().requires_grad_()
    losses = Softmax()(leaves[0], torch.cat([of_scores, leaves[1][:, None]], dim=1))
    expected = (losses * torch.from_numpy(factors)).sum()
    expected.backward()
    missing, own_shares, found = np.full((3, NUM), np.nan, np.float32)
    got = softmax(NO_WEIGHTS, words(scores), positive, own, factors, missing, own_shares, factors, found)
    assert got == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(found, losses.detach(), rtol=1e-5)
    for mine, leaf in ((missing, leaves[0]), (own_shares, leaves[1])):
        np.testing.assert_allclose(mine, leaf.grad, rtol=1e-4, atol=2e-7)
    rough = 2**-8 if dtype == torch.bfloat16 else 1e-5
    np.testing.assert_allclose(scores.float(), of_scores.grad, rtol=rough, atol=1e-20)
    assert not scores[5].any() and scores[3, 4] == 0


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["scores", "positive", "own"])
def test_what_is_not_finite_stays_so_and_in_its_row(where: str, poison: float) -> None:
    scores, positive, own, factors = scores_of(1.0, torch.float32)
    {"scores": scores[:, 2], "positive": positive, "own": own}[where][1] = poison
    missing, own_shares, found = np.zeros((3, NUM), np.float32)
    loss = softmax(NO_WEIGHTS, words(scores), positive, own, factors, missing, own_shares, factors, found)
    assert not np.isfinite(loss)
    assert np.isnan(missing[1]) and np.isnan(own_shares[1]) and scores[1].isnan().all()
    others = np.arange(NUM) != 1
    assert np.isfinite(missing[others]).all() and scores[torch.from_numpy(others)].isfinite().all()


def test_powers_of_e() -> None:
    exponents = np.linspace(-59.9, 0, 40001, dtype=np.float32)
    got = np.array([power(x) for x in exponents])
    np.testing.assert_allclose(got, np.exp(exponents.astype(np.float64)), rtol=4e-7)
    assert power(np.float32(0)) == 1
    assert power(np.float32(-60.5)) == 0 and power(np.float32(-np.inf)) == 0


@pytest.mark.parametrize("num_negatives", [1, 8, 100])
def test_negatives_that_are_the_answer_are_ignored(num_negatives: int) -> None:
    draw = np.random.default_rng(num_negatives)
    truths, negatives = draw.integers(0, 20, 50) << 40, draw.integers(0, 20, num_negatives) << 40
    scores = np.zeros((50, num_negatives), np.float32)
    slots = np.full((2 << num_negatives.bit_length()) + num_negatives, 12345, np.int32)
    ignore_truths(truths, negatives, np.float32(-7), slots, scores)
    assert np.array_equal(scores == -7, truths[:, None] == negatives[None, :])


def test_the_greatest_of_a_row() -> None:
    draw = np.random.default_rng(2).normal(size=(50, 33)).astype(np.float32)
    draw[:10] = -np.abs(draw[:10])
    draw[11, 3], draw[12] = np.inf, IGNORED_SCORE
    assert [greatest_of(row) for row in draw] == draw.max(axis=1).tolist()
