"""Losses of queries and their gradients in one pass over the scores: loops generated from formulas.

A loss is a term of the true answer and one of each negative. Formulas are compiled by ``compiled_inline``:

    truth(score, label, margin) -> value, slope        the true answer with that confidence
    term(score, positive, margin) -> value, slope, slope of the true answer's score

Here are those of ``dglkge.model.losses``, where sources are given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray

from dglkge.kernels.jit import compiled, compiled_inline
from dglkge.kernels.rows import load_row, store_row
from dglkge.kernels.softmax import LOWEST_COUNTED, greatest_of, logarithm_of_1_to_2, power

MEAN, MEAN_WITH_TRUTH, SUM, ADVERSARIAL = range(4)
"""Reductions of the terms: mean over the negatives; mean over these and the true answer; sum; mean weighted
by the softmax of temperature times score."""


@compiled_inline
def softplus(score: Any) -> Any:
    """Return log(1 + e^s) and its derivative, the sigmoid: max(s, 0) + log(1 + e^-|s|)."""
    one = np.float32(1)
    small = power(-np.abs(score))
    value = max(score, np.float32(0)) + logarithm_of_1_to_2(one + small)
    return value, (one if score > 0 else small) / (one + small)


@compiled_inline
def logistic_truth(score: Any, label: Any, margin: Any) -> Any:
    """Return c softplus(-s) + (1 - c) softplus(s), which is softplus(s) - c s."""
    shifted = score + margin
    value, slope = softplus(shifted)
    # For a certain answer directly: the difference of two large numbers would lose digits.
    of_certain, _ = softplus(-shifted)
    return (of_certain if label == 1 else value - label * shifted), slope - label


@compiled_inline
def logistic_term(score: Any, positive: Any, margin: Any) -> Any:
    """Return softplus(n + margin)."""
    value, slope = softplus(score + margin)
    return value, slope, np.float32(0)


@compiled_inline
def hinge_truth(score: Any, label: Any, margin: Any) -> Any:
    """Return c max(0, margin - s) + (1 - c) max(0, margin + s)."""
    zero, one = np.float32(0), np.float32(1)
    value = label * max(margin - score, zero) + (one - label) * max(margin + score, zero)
    return value, (one - label if margin + score > 0 else zero) - (label if margin - score > 0 else zero)


@compiled_inline
def hinge_term(score: Any, positive: Any, margin: Any) -> Any:
    """Return max(0, margin + n)."""
    zero, one = np.float32(0), np.float32(1)
    return max(margin + score, zero), (one if margin + score > 0 else zero), zero


@compiled_inline
def squared_truth(score: Any, label: Any, margin: Any) -> Any:
    """Return (s - c)^2."""
    return (score - label) * (score - label), np.float32(2) * (score - label)


@compiled_inline
def squared_term(score: Any, positive: Any, margin: Any) -> Any:
    """Return n^2."""
    return score * score, np.float32(2) * score, np.float32(0)


@compiled_inline
def no_truth(score: Any, label: Any, margin: Any) -> Any:
    """Return 0: the true answer has no term of its own."""
    return np.float32(0), np.float32(0)


@compiled_inline
def ranking_term(score: Any, positive: Any, margin: Any) -> Any:
    """Return max(0, margin - p + n)."""
    zero, one = np.float32(0), np.float32(1)
    shortfall = score + (margin - positive)
    slope = one if shortfall > 0 else zero
    return max(shortfall, zero), slope, -slope


@functools.cache
def loss_loop(truth: Callable, term: Callable) -> Callable:
    """Return the compiled loss of some formulas, ``truth`` and ``term`` of the module's text, cached under
    their names.

    Returns
    -------
    callable
        Takes ``numbers`` = (margin, reduction, temperature), float32, int and float32; ``scores`` "(Q, N)" of
        the negatives, float32 or bfloat16 words, which are overwritten by their gradients; and ``queries``,
        seven float32 arrays "(Q,)": ``positive`` and ``own``, scores of the true answers and of one negative
        more; ``factors`` of the losses; ``missing`` and ``own_shares``, gradients of ``positive`` and
        ``own``, written; ``labels``; ``losses``, written without their factors. Negatives with scores below
        ``LOWEST_COUNTED`` do not count. NaN and infinity in a row make its loss and gradients NaN. Returns
        the sum of factor times loss.
    """

    def compute(numbers: tuple, scores: ndarray, queries: tuple) -> float:
        margin, reduction, temperature = numbers
        positive, own, factors, missing, own_shares, labels, losses = queries
        num = scores.shape[1]
        zero, one = np.float32(0), np.float32(1)
        row, weights = np.empty(num + 1, np.float32), np.empty(num + 1, np.float32)
        total = 0.0
        for i in range(scores.shape[0]):
            load_row(scores[i], row[:num])
            row[num] = own[i]
            # 0 times NaN or infinity is NaN.
            poison, count = positive[i] * zero, zero
            for j in range(num + 1):
                poison += row[j] * zero
                weights[j] = one if row[j] > LOWEST_COUNTED else zero
                count += weights[j]
            share, truth_share = one, one
            if reduction == ADVERSARIAL:
                greatest, sum_of_powers = greatest_of(row), zero
                for j in range(num + 1):
                    weights[j] *= power((row[j] - greatest) * temperature)
                    sum_of_powers += weights[j]
                # Without a negative that counts: no weight at all, and a loss of 0.
                share = one / sum_of_powers if sum_of_powers > 0 else zero
            elif reduction == MEAN:
                share = one / max(count, one)
            elif reduction == MEAN_WITH_TRUTH:
                share = truth_share = one / (one + count)
            value, slope = truth(positive[i], labels[i], margin)
            of_terms, of_positive = zero, zero
            for j in range(num + 1):
                # Not -1e30, whose square overflows.
                score = row[j] if weights[j] > 0 else zero
                each, of_score, of_truth = term(score, positive[i], margin)
                of_terms += weights[j] * each
                of_positive += weights[j] * of_truth
                row[j] = weights[j] * of_score
            factor = factors[i]
            losses[i] = truth_share * value + share * of_terms + poison
            missing[i] = factor * (truth_share * slope + share * of_positive + poison)
            scale = factor * (share + poison)
            own_shares[i] = scale * row[num]
            store_row(row[:num], scale, scores[i])
            total += factor * losses[i]
        return total

    compute.__name__ = compute.__qualname__ = f"loss_of_{truth.__name__}_and_{term.__name__}"
    return compiled(compute)
