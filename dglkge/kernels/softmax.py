"""Compiled loops over scores: masking of negatives that are the true answer; losses and their gradients."""

from __future__ import annotations

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
    found = x + (p * x * square - kind(0.5) * square)
    return found + LN2 if is_high else found


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


@compiled_inline
def link_equal(ids: ndarray, slots: ndarray) -> Any:
    """Enter ids into a hash table and link the places of equal ones; returns (table, links, mask)."""
    num_slots = slots.shape[0] - ids.shape[0]
    table, links = slots[:num_slots], slots[num_slots:]
    table[:] = -1
    mask = np.uint64(num_slots - 1)
    for j in range(ids.shape[0]):
        slot = find_slot(ids[j], table, ids, mask)
        links[j] = table[slot]
        table[slot] = j
    return table, links, mask


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
    table, links, mask = link_equal(negative_ids, slots)
    for i in range(first.shape[0]):
        for place in range(first[i], first[i] + count[i]):
            j = table[find_slot(np.int64(answers[place]), table, negative_ids, mask)]
            while j >= 0:
                scores[i, j] = ignored
                j = links[j]


@compiled
def lower_same_range(ranges: tuple, offset: Any, scores: ndarray, positive: ndarray, own: ndarray) -> None:
    """Lower the scores of answers that are in the range of the query's own entity, and of that entity.

    Parameters
    ----------
    ranges : three ndarray
        "(Q,)", "(Q,)" and "(N,) bool": in which of two ranges the queries' entities, the true answers and
        the negatives are.
    offset : np.float32
        What is subtracted.
    scores, positive, own : ndarray
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
        own[i] -= offset


@compiled
def count_above(scores: ndarray, positive: ndarray, own: ndarray) -> int:
    """Count the negatives, the own entities among them, that score above the true answer; as
    :func:`lower_same_range`.
    """
    row = np.empty(scores.shape[1], np.float32)
    total = 0
    for i in range(scores.shape[0]):
        load_row(scores[i], row)
        total += own[i] > positive[i]
        above = np.int32(0)
        for j in range(row.shape[0]):
            above += np.int32(row[j] > positive[i])
        total += above
    return total


@compiled_inline
def weigh(row: ndarray, own: Any, temperature: Any) -> Any:
    """Add log(K w_j) to the scores of K negatives, w = softmax(temperature n); returns the own one's."""
    greatest, total, count = max(own, greatest_of(row)), np.float32(0), np.float32(0)
    for j in range(row.shape[0]):
        is_counted = np.float32(1) if row[j] > LOWEST_COUNTED else np.float32(0)
        total += is_counted * power((row[j] - greatest) * temperature)
        count += is_counted
    if own > LOWEST_COUNTED:
        total += power((own - greatest) * temperature)
        count += np.float32(1)
    shift = np.log(max(count, np.float32(1)) / max(total, np.float32(1e-30))) - temperature * greatest
    for j in range(row.shape[0]):
        row[j] += shift + temperature * row[j] if row[j] > LOWEST_COUNTED else np.float32(0)
    return own + shift + temperature * own if own > LOWEST_COUNTED else own


@compiled
def softmax(temperature: float, scores: ndarray, queries: tuple) -> float:
    """Overwrite scores by the gradients of the summed softmax loss; returns the loss.

    With p the probabilities and f a query's factor: the gradients are f p_j for the negatives, f (p_t - 1)
    for the true answer and f p_o for the own entity. NaN and infinity in a row make its loss NaN.

    ``temperature`` is that of adversarial weights, see :func:`weigh`; below 0: none. The other arguments are
    those of :func:`dglkge.kernels.losses.loss_loop`; labels are not read, as every true answer is certain.
    """
    positive, own, factors, missing, own_shares, _, losses = queries
    row = np.empty(scores.shape[1], np.float32)
    loss = 0.0
    for i in range(scores.shape[0]):
        load_row(scores[i], row)
        own_score = own[i]
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
