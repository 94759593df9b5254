"""Loops of products and softmax against torch: rows in bfloat16; great and ignored scores, and NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.embeddings.row_lookup import FoundRows
from dglkge.kernels import dot as dot_kernels
from dglkge.kernels.losses import softmax
from dglkge.kernels.rows import narrow, widen
from dglkge.model.functions.autograd import words
from dglkge.model.losses import Softmax
from dglkge.model.negative_terms import IGNORED_SCORE

NUM, NUM_NEGATIVES = 11, 37

NO_WEIGHTS = np.float32(-1)


def scores_of(scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray, np.ndarray, np.ndarray]:
    """Return scores (some ignored), positive and own scores, and factors."""
    draw = torch.Generator().manual_seed(5)
    scores = (torch.randn(NUM, NUM_NEGATIVES, generator=draw) * scale).to(dtype)
    positive, own_scores = (torch.randn(2, NUM, generator=draw) * scale).numpy()
    scores[3, 4], scores[5] = IGNORED_SCORE, IGNORED_SCORE
    own_scores[3] = own_scores[5] = IGNORED_SCORE
    factors = torch.rand(NUM, generator=draw).numpy()
    factors[7] = 0
    return scores, positive, own_scores, factors


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 0.1), (torch.float32, 300.0), (torch.bfloat16, 3.0)]
)
def test_loss_and_gradients_equal_those_of_autograd(dtype: torch.dtype, scale: float) -> None:
    scores, positive, own_scores, factors = scores_of(scale, dtype)
    leaves = [torch.from_numpy(array).double().requires_grad_() for array in (positive, own_scores)]
    score_leaf = scores.double().requires_grad_()
    losses = Softmax()(leaves[0], torch.cat([score_leaf, leaves[1][:, None]], dim=1))
    expected = (losses * torch.from_numpy(factors)).sum()
    expected.backward()
    missing, own_shares, query_losses = np.full((3, NUM), np.nan, np.float32)
    numbers = (positive, own_scores, factors, missing, own_shares, factors, query_losses)
    got = softmax(NO_WEIGHTS, words(scores), numbers)
    assert got == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(query_losses, losses.detach(), rtol=1e-5)
    for mine, leaf in ((missing, leaves[0]), (own_shares, leaves[1])):
        np.testing.assert_allclose(mine, leaf.grad, rtol=1e-4, atol=2e-7)
    rough = 2**-8 if dtype == torch.bfloat16 else 1e-5
    np.testing.assert_allclose(scores.float(), score_leaf.grad, rtol=rough, atol=1e-20)
    assert not scores[5].any() and scores[3, 4] == 0


@pytest.mark.parametrize(
    ("where", "poison"), [("scores", np.nan), ("scores", np.inf), ("positive", np.inf), ("own", np.nan)]
)
def test_what_is_not_finite_stays_so_and_in_its_row(where: str, poison: float) -> None:
    scores, positive, own_scores, factors = scores_of(1.0, torch.float32)
    {"scores": scores[:, 2], "positive": positive, "own": own_scores}[where][1] = poison
    missing, own_shares, query_losses = np.zeros((3, NUM), np.float32)
    numbers = (positive, own_scores, factors, missing, own_shares, factors, query_losses)
    loss = softmax(NO_WEIGHTS, words(scores), numbers)
    assert not np.isfinite(loss)
    assert np.isnan(missing[1]) and np.isnan(own_shares[1]) and scores[1].isnan().all()
    rest = np.arange(NUM) != 1
    assert np.isfinite(missing[rest]).all() and scores[torch.from_numpy(rest)].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_gathered_in_either_type(dtype: torch.dtype) -> None:
    table = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    numbers = np.array([6, 0, 0, 3])
    operand = torch.full((4, 5), torch.nan, dtype=dtype)
    dot_kernels.gather(FoundRows.in_array(table.numpy(), numbers).addresses, words(operand))
    assert torch.equal(operand, table[torch.from_numpy(numbers)].to(dtype))


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    draw = np.random.default_rng(0).integers(0, 1 << 32, 20000, dtype=np.uint32)
    halves = np.arange(0, 1 << 16, 7, dtype=np.uint32)
    ties = np.concatenate([halves << 16 | np.uint32(low) for low in (0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    numbers = np.concatenate([draw, ties]).astype(np.uint32).view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    got = np.array([narrow(number) for number in numbers], np.uint16)
    assert np.array_equal(got, words(torch.from_numpy(numbers).bfloat16()))
    assert np.isnan(widen(narrow(np.float32(np.nan))))
    assert [widen(narrow(np.float32(x))) for x in (np.inf, -np.inf, 1.5)] == [np.inf, -np.inf, 1.5]
