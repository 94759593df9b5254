"""The fused softmax against the plain one: values and gradients."""

from __future__ import annotations

import pytest
import torch

from dglkge.model.losses import Softmax
from dglkge.model.softmax_of_products import SoftmaxOfProducts

B, N, D = 7, 11, 6


def rows(dtype: torch.dtype, scale: float = 1.0) -> list[torch.Tensor]:
    """Return query, truths, negatives and own."""
    torch.manual_seed(1)
    return [(torch.randn(count, D) * scale).to(dtype).requires_grad_() for count in (B, B, N, B)]


IGNORED = torch.zeros(B, N, dtype=torch.bool)
IGNORED[0, 3] = IGNORED[2, 3] = IGNORED[2, 10] = True
IGNORED[4] = True
OWN_IGNORED = torch.tensor([False, True, False, False, True, False, False])


def plain(
    query: torch.Tensor, truths: torch.Tensor, negatives: torch.Tensor, own: torch.Tensor
) -> torch.Tensor:
    """The same loss through autograd."""
    scores = torch.cat([query @ negatives.T, (query * own).sum(1, keepdim=True)], dim=1)
    ignored = torch.cat([IGNORED, OWN_IGNORED[:, None]], dim=1)
    return Softmax()((query * truths).sum(1), scores, ignored)


def fused(
    query: torch.Tensor,
    truths: torch.Tensor,
    negatives: torch.Tensor,
    own: torch.Tensor,
    products: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The loss under test."""
    places = torch.nonzero(IGNORED, as_tuple=True)
    return SoftmaxOfProducts.apply(query, truths, negatives, own, places, OWN_IGNORED, products)


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_values_and_gradients_equal_those_of_autograd(scale: float) -> None:
    weights = torch.linspace(0.5, 2, B)
    ours, theirs = rows(torch.float32, scale), rows(torch.float64, scale)
    got, expected = fused(*ours), plain(*theirs)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5 * scale)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, oracle in zip(ours, theirs):
        assert mine.grad is not None and oracle.grad is not None
        torch.testing.assert_close(mine.grad.double(), oracle.grad, rtol=1e-4, atol=1e-4 * scale)


def test_without_the_own_entity() -> None:
    query, truths, negatives, _ = rows(torch.float32)
    places = torch.nonzero(IGNORED, as_tuple=True)
    got = SoftmaxOfProducts.apply(query, truths, negatives, None, places, None, torch.float32)
    expected = Softmax()((query * truths).sum(1), query @ negatives.T, IGNORED)
    torch.testing.assert_close(got, expected)
    ours = torch.autograd.grad(got.sum(), [query, truths, negatives])
    theirs = torch.autograd.grad(expected.sum(), [query, truths, negatives])
    for mine, oracle in zip(ours, theirs):
        torch.testing.assert_close(mine, oracle)


def test_a_query_without_negatives_has_no_loss_and_no_gradient() -> None:
    ours = rows(torch.float32)
    got = fused(*ours)
    assert got[4].item() == 0.0
    gradients = torch.autograd.grad(got[4], ours)
    assert all(not gradient.any() for gradient in gradients)


def test_bfloat16_products_stay_within_their_rounding() -> None:
    """bfloat16 keeps 8 bits: scores are off by about |q| |n| / 256, and probabilities by that share."""
    ours, exact = rows(torch.float32), rows(torch.float32)
    got, expected = fused(*ours, products=torch.bfloat16), fused(*exact)
    assert not torch.equal(got, expected)
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.05)
    got.sum().backward()
    expected.sum().backward()
    for mine, oracle in zip(ours, exact):
        assert mine.grad is not None and oracle.grad is not None and mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, oracle.grad, rtol=0.1, atol=0.1)
