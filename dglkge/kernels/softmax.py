"""Compiled loops over scores: masking of negatives that are the true answer; softmax and its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from dglkge.kernels.bfloat16 import bits_of, float_of, load_row, store_row
from dglkge.kernels.chains import slot_of
from dglkge.kernels.jit import compiled, compiled_inline

LOWEST_EXPONENT = np.float32(-60.0)
"""Powers below e^-60 count as 0: they are lost in any float32 sum with 1, and denormal numbers are slow."""
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)


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
def greatest_of(row: np.ndarray) -> Any:
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
def link_equal(ids: np.ndarray, slots: np.ndarray) -> Any:
    """Enter ids into a hash table and link the places of equal ones; returns (table, links, mask)."""
    num_slots = slots.shape[0] - ids.shape[0]
    table, links = slots[:num_slots], slots[num_slots:]
    table[:] = -1
    mask = np.uint64(num_slots - 1)
    for j in range(ids.shape[0]):
        slot = slot_of(ids[j], mask)
        while table[slot] >= 0 and ids[table[slot]] != ids[j]:
            slot = (slot + np.uint64(1)) & mask
        links[j] = table[slot]
        table[slot] = j
    return table, links, mask


@compiled_inline
def last_equal(wanted: Any, ids: np.ndarray, table: np.ndarray, mask: Any) -> Any:
    """Return the last place of an id among those of :func:`link_equal`, -1 where it is absent."""
    slot = slot_of(wanted, mask)
    while table[slot] >= 0 and ids[table[slot]] != wanted:
        slot = (slot + np.uint64(1)) & mask
    return table[slot]


@compiled
def ignore_truths(
    true_ids: np.ndarray, negative_ids: np.ndarray, ignored: float, slots: np.ndarray, scores: np.ndarray
) -> None:
    """Overwrite the scores of negatives that are the true answer.

    Parameters
    ----------
    true_ids, negative_ids : np.ndarray
        "(B,) int64" and "(N,) int64".
    ignored : scalar of the type of the scores
        Value that is written.
    slots : np.ndarray
        "(H + N,) int32" room for a hash table of H slots, a power of two and at least 2 N, and for links.
    scores : np.ndarray
        "(B, N)", changed.
    """
    table, links, mask = link_equal(negative_ids, slots)
    for i in range(true_ids.shape[0]):
        j = last_equal(true_ids[i], negative_ids, table, mask)
        while j >= 0:
            scores[i, j] = ignored
            j = links[j]


@compiled
def ignore_known(
    first: np.ndarray,
    count: np.ndarray,
    answers: np.ndarray,
    negative_ids: np.ndarray,
    ignored: float,
    slots: np.ndarray,
    scores: np.ndarray,
) -> None:
    """Overwrite the scores of negatives that are known answers.

    Every known answer is looked up among the negatives: no pair of a query and a negative is visited
    otherwise.

    Parameters
    ----------
    first, count : np.ndarray
        "(B,) int64": the answers to query i are ``answers[first[i] : first[i] + count[i]]``.
    answers, negative_ids : np.ndarray
        "(A,) int64" and "(N,) int64".
    ignored, slots, scores
        See :func:`ignore_truths`; the scores may also be a mask, written with True.
    """
    table, links, mask = link_equal(negative_ids, slots)
    for i in range(first.shape[0]):
        for place in range(first[i], first[i] + count[i]):
            j = last_equal(answers[place], negative_ids, table, mask)
            while j >= 0:
                scores[i, j] = ignored
                j = links[j]


@compiled
def softmax(
    scores: np.ndarray,
    positive: np.ndarray,
    own: np.ndarray,
    factors: np.ndarray,
    missing: np.ndarray,
    own_shares: np.ndarray,
) -> float:
    """Overwrite scores by the gradients of the summed softmax loss; returns the loss.

    With p the probabilities and f a query's factor: the gradients are f p_j for the negatives, f (p_t - 1)
    for the true answer and f p_o for the own entity. NaN and infinity in a row make its loss NaN.

    Parameters
    ----------
    scores : np.ndarray
        "(Q, N)" scores of the negatives, float32 or bfloat16 words; overwritten by their gradients.
    positive, own : np.ndarray
        "(Q,) float32" scores of the true answer and of the own entity.
    factors : np.ndarray
        "(Q,) float32".
    missing, own_shares : np.ndarray
        "(Q,) float32" gradients of ``positive`` and ``own``, written.

    Returns
    -------
    float
        Sum over queries of factor times loss.
    """
    row = np.empty(scores.shape[1], np.float32)
    loss = 0.0
    for i in range(scores.shape[0]):
        load_row(scores[i], row)
        # Subtracting the greatest score keeps every power at most 1.
        greatest = max(positive[i], own[i], greatest_of(row))
        # 0 times NaN or infinity is NaN: the loss becomes NaN if one score is not finite.
        total = (positive[i] + own[i]) * np.float32(0)
        for j in range(row.shape[0]):
            total += row[j] * np.float32(0)
        positive_power, own_power = power(positive[i] - greatest), power(own[i] - greatest)
        total += positive_power + own_power
        for j in range(row.shape[0]):
            row[j] = power(row[j] - greatest)
            total += row[j]
        factor = factors[i]
        share = factor / total
        missing[i] = positive_power * share - factor
        own_shares[i] = own_power * share
        loss += factor * (np.log(total) + greatest - positive[i])
        store_row(row, share, scores[i])
    return loss
