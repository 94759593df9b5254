"""Compiled loops over scores: masking of negatives that are the true answer; losses and their gradients.

A loss is a term of the true answer and one of each negative. Formulas are compiled by ``compiled_inline``:

    truth(score, label, margin) -> value, slope        the true answer with that confidence
    term(score, positive, margin) -> value, slope, slope of the true answer's score

Here are those of ``dglkge.model.losses``, where sources are given; the softmax has a loop of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray

from dglkge.kernels.chains import find_slot
from dglkge.kernels.jit import compiled, compiled_inline
from dglkge.kernels.rows import bits_of, float_of, load_row, store_row

LOWEST_EXPONENT = np.float32(-60.0)
"""Powers below e^-60 count as 0: they are lost in any float32 sum with 1, and denormal numbers are slow."""
LOWEST_COUNTED = np.float32(-5e29)
"""Scores below it are of negatives that do not count."""
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
LN2, SQUARE_ROOT_OF_2 = np.float32(0.6931471805599453), np.float32(1.4142135623730951)


@compiled_inline
def power(exponent: Any) -> Any:
    """Return e^x for x <= 0 in float32, relative error below 3e-7; 0 below :data:`LOWEST_EXPONENT`.

    Cephes' ``expf`` (Moshier 1989): x = n ln 2 + r with ln 2 in two parts, a polynomial of r, times 2^n.
    Written out, so that the loop around it is vectorised.
    """
    kind = np.float32
    is_kept = exponent > LOWEST_EXPONENT
    # Selects instead of branches, so that the loop around is vectorised; dropped lanes compute e^0.
    x = exponent if is_kept else kind(0)
    whole = np.floor(x * LOG2_E + kind(0.5))
    r = x - whole * LN2_HIGH
    r = r - whole * LN2_LOW
    p = kind(1.9875691500e-4)
    p = p * r + kind(1.3981999507e-3)
    p = p * r + kind(8.3334519073e-3)
    p = p * r + kind(4.1665795894e-2)
    p = p * r + kind(1.6666665459e-1)
    p = p * r + kind(5.0000001201e-1)
    p = p * r * r + r + kind(1)
    # 2^n by writing n + 127 into the exponent bits.
    two_to_whole = float_of(np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)))
    return p * two_to_whole if is_kept else kind(0)


@compiled_inline
def logarithm_of_1_to_2(number: Any) -> Any:
    """Return the natural logarithm of a float32 number in [1, 2], absolute error below 2e-7.

    Cephes' ``logf`` (Moshier 1989): a polynomial around 1, after division by 2 above the root of 2. Written
    out, so that the loop around it is vectorised.
    """
    kind = np.float32
    is_high = number > SQUARE_ROOT_OF_2
    x = (number * kind(0.5) if is_high else number) - kind(1)
    p = kind(7.0376836292e-2)
    p = p * x + kind(-1.1514610310e-1)
    p = p * x + kind(1.1676998740e-1)
    p = p * x + kind(-1.2420140846e-1)
    p = p * x + kind(1.4249322787e-1)
    p = p * x + kind(-1.6668057665e-1)
    p = p * x + kind(2.0000714765e-1)
    p = p * x + kind(-2.4999993993e-1)
    p = p * x + kind(3.3333331174e-1)
    square = x * x
    value = x + (p * x * square - kind(0.5) * square)
    return value + LN2 if is_high else value


@compiled_inline
def greatest_of(row: ndarray) -> Any:
    """Return the greatest of float32 numbers.

    Compared as integers in the same order: LLVM does not vectorise a maximum of floats, because of NaN.
    """
    greatest = np.int32(-2147483648)
    for j in range(row.shape[0]):
        greatest = max(greatest, _in_order(np.int32(bits_of(row[j]))))
    return float_of(np.uint32(_in_order(greatest)))


@compiled_inline
def _in_order(bits: Any) -> Any:
    """Map the bits of floats to integers of the same order, and back."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@compiled
def ignore_known(
    known: tuple, negative_ids: ndarray, ignored: float, slots: ndarray, scores: ndarray
) -> None:
    """Overwrite the scores of negatives that are known answers, the true one among them.

    Every known answer is looked up among the negatives: no pair of a query and a negative is visited
    otherwise.

    Parameters
    ----------
    known : three ndarray
        (first, count, answers), "(B,)" and "(B,) int64", "(A,) int64 or uint32": the answers to query i are
        ``answers[first[i] : first[i] + count[i]]``.
    negative_ids : ndarray
        "(N,) int64".
    ignored : scalar of the type of the scores
        Value that is written.
    slots : ndarray
        "(H + N,) int32" room for a hash table of H slots, a power of two and at least 2 N, and for links.
    scores : ndarray
        "(B, N)", changed; or a mask, written with True.
    """
    first, count, answers = known
    num_slots = slots.shape[0] - negative_ids.shape[0]
    table, links = slots[:num_slots], slots[num_slots:]
    table[:] = -1
    mask = np.uint64(num_slots - 1)
    # Places of equal ids are linked.
    for j in range(negative_ids.shape[0]):
        slot = find_slot(negative_ids[j], table, negative_ids, mask)
        links[j] = table[slot]
        table[slot] = j
    for i in range(first.shape[0]):
        for place in range(first[i], first[i] + count[i]):
            j = table[find_slot(np.int64(answers[place]), table, negative_ids, mask)]
            while j >= 0:
                scores[i, j] = ignored
                j = links[j]


@compiled
def lower_same_range(
    ranges: tuple, offset: Any, scores: ndarray, positive: ndarray, own_scores: ndarray
) -> None:
    """Lower the scores of answers that are in the range of the query's own entity, and of that entity.

    Parameters
    ----------
    ranges : three ndarray
        "(Q,)", "(Q,)" and "(N,) bool": in which of two ranges the queries' entities, the true answers and
        the negatives are.
    offset : np.float32
        What is subtracted.
    scores, positive, own_scores : ndarray
        As of :func:`dglkge.kernels.losses.loss_loop`, changed.
    """
    anchors, truths, negatives = ranges
    row = np.empty(scores.shape[1], np.float32)
    for i in range(anchors.shape[0]):
        load_row(scores[i], row)
        anchor = anchors[i]
        for j in range(row.shape[0]):
            row[j] -= offset if negatives[j] == anchor else np.float32(0)
        store_row(row, np.float32(1), scores[i])
        positive[i] -= offset if truths[i] == anchor else np.float32(0)
        own_scores[i] -= offset


@compiled
def count_above(scores: ndarray, positive: ndarray, own_scores: ndarray) -> int:
    """Count the negatives, the own entities among them, that score above the true answer; as
    :func:`lower_same_range`.
    """
    row = np.empty(scores.shape[1], np.float32)
    total = 0
    for i in range(scores.shape[0]):
        load_row(scores[i], row)
        total += own_scores[i] > positive[i]
        above = np.int32(0)
        for j in range(row.shape[0]):
            above += np.int32(row[j] > positive[i])
        total += above
    return total


@compiled_inline
def weigh(row: ndarray, own_score: Any, temperature: Any) -> Any:
    """Add log(K w_j) to the scores of K negatives, w = softmax(temperature n); returns the own score's."""
    greatest, total, count = max(own_score, greatest_of(row)), np.float32(0), np.float32(0)
    for j in range(row.shape[0]):
        is_counted = np.float32(1) if row[j] > LOWEST_COUNTED else np.float32(0)
        total += is_counted * power((row[j] - greatest) * temperature)
        count += is_counted
    if own_score > LOWEST_COUNTED:
        total += power((own_score - greatest) * temperature)
        count += np.float32(1)
    shift = np.log(max(count, np.float32(1)) / max(total, np.float32(1e-30))) - temperature * greatest
    for j in range(row.shape[0]):
        row[j] += shift + temperature * row[j] if row[j] > LOWEST_COUNTED else np.float32(0)
    return own_score + shift + temperature * own_score if own_score > LOWEST_COUNTED else own_score


@compiled
def softmax(temperature: float, scores: ndarray, queries: tuple) -> float:
    """Overwrite scores by the gradients of the summed softmax loss; returns the loss.

    With p the probabilities and f a query's factor: the gradients are f p_j for the negatives, f (p_t - 1)
    for the true answer and f p_o for the own entity. NaN and infinity in a row make its loss NaN.

    ``temperature`` is that of adversarial weights, see :func:`weigh`; below 0: none. The other arguments are
    those of :func:`dglkge.kernels.losses.loss_loop`; labels are not read, as every true answer is certain.
    """
    positive, own_scores, factors, missing, own_shares, _, losses = queries
    row = np.empty(scores.shape[1], np.float32)
    loss = 0.0
    for i in range(scores.shape[0]):
        load_row(scores[i], row)
        own_score = own_scores[i]
        if temperature >= 0:
            own_score = weigh(row, own_score, temperature)
        # Subtracting the greatest score keeps every power at most 1.
        greatest = max(positive[i], own_score, greatest_of(row))
        # 0 times NaN or infinity is NaN: the loss becomes NaN if one score is not finite.
        total = (positive[i] + own_score) * np.float32(0)
        for j in range(row.shape[0]):
            total += row[j] * np.float32(0)
        positive_power, own_power = power(positive[i] - greatest), power(own_score - greatest)
        total += positive_power + own_power
        for j in range(row.shape[0]):
            row[j] = power(row[j] - greatest)
            total += row[j]
        factor = factors[i]
        share = factor / total
        missing[i] = positive_power * share - factor
        own_shares[i] = own_power * share
        losses[i] = np.log(total) + greatest - positive[i]
        loss += factor * losses[i]
        store_row(row, share, scores[i])
    return loss


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
    certain, _ = softplus(-shifted)
    return (certain if label == 1 else value - label * shifted), slope - label


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
        seven float32 arrays "(Q,)": ``positive`` and ``own_scores``, scores of the true answers and of one
        more negative; ``factors`` of the losses; ``missing`` and ``own_shares``, their gradients, written;
        ``labels``; ``losses``, written without their factors. Negatives with scores below
        ``LOWEST_COUNTED`` do not count. NaN and infinity in a row make its loss and gradients NaN. Returns
        the sum of factor times loss.
    """

    def compute(numbers: tuple, scores: ndarray, queries: tuple) -> float:
        margin, reduction, temperature = numbers
        positive, own_scores, factors, missing, own_shares, labels, losses = queries
        num = scores.shape[1]
        zero, one = np.float32(0), np.float32(1)
        row, weights = np.empty(num + 1, np.float32), np.empty(num + 1, np.float32)
        total = 0.0
        for i in range(scores.shape[0]):
            load_row(scores[i], row[:num])
            row[num] = own_scores[i]
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
            value_sum, slope_sum = zero, zero
            for j in range(num + 1):
                # Not -1e30, whose square overflows.
                score = row[j] if weights[j] > 0 else zero
                term_value, score_slope, truth_slope = term(score, positive[i], margin)
                value_sum += weights[j] * term_value
                slope_sum += weights[j] * truth_slope
                row[j] = weights[j] * score_slope
            factor = factors[i]
            losses[i] = truth_share * value + share * value_sum + poison
            missing[i] = factor * (truth_share * slope + share * slope_sum + poison)
            scale = factor * (share + poison)
            own_shares[i] = scale * row[num]
            store_row(row[:num], scale, scores[i])
            total += factor * losses[i]
        return total

    compute.__name__ = compute.__qualname__ = f"loss_of_{truth.__name__}_and_{term.__name__}"
    return compiled(compute)
