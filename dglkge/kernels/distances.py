"""Compiled distances: sums of complex moduli, Manhattan distances, and Euclidean ones from their matmul.

No intermediate of (B, N, D) numbers is written. A backward loop takes four queries at a time: what it reads
and writes of a candidate then counts for four pairs. Sums may be reordered and products fused. The divisions
by square roots in :func:`add_modulus_gradients` are estimates with one step of Newton's iteration in float32
(off by some units in the last place) and exact in float64; the distances themselves have exact roots.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy import ndarray

from dglkge.kernels.jit import compiled, compiled_unaliased, compiled_with_reciprocals
from dglkge.kernels.rows import load_row, store_row

CANDIDATE_BLOCK = 64
"""Candidates in a block: all queries use it before the next, so that it stays in the L1 cache."""
GRADIENT_BLOCK = 16
"""The same in a backward loop, where gradients and four queries take their part of the cache."""
AT_ONCE = 4
"""Rows that a loop takes at a time; the callers pad with zeros."""
SMALLEST_SQUARE = 1e-37
"""Added to a squared modulus before the division by its root: a modulus of 0 then has a gradient of 0."""


@compiled
def fill_moduli(query: ndarray, candidates: ndarray, distances: ndarray) -> None:
    """Write sum_k |q_k - c_k| of all pairs: (B, D), (N, D) -> (B, N); rows are [real, imaginary] parts."""
    half = query.shape[1] // 2
    for first in range(0, len(candidates), CANDIDATE_BLOCK):
        for i in range(len(query)):
            for j in range(first, min(first + CANDIDATE_BLOCK, len(candidates))):
                total = query.dtype.type(0)
                for k in range(half):
                    real = query[i, k] - candidates[j, k]
                    imaginary = query[i, k + half] - candidates[j, k + half]
                    total += np.sqrt(real * real + imaginary * imaginary)
                distances[i, j] = total


@compiled_with_reciprocals
def _add_four_moduli(
    query: tuple, candidate: ndarray, gradient: tuple, grad_query: tuple, grad_candidate: ndarray
) -> None:
    """Add the gradients of four queries, tuples of rows "(D,)", and one candidate."""
    first, second, third, fourth = query
    grad_first, grad_second, grad_third, grad_fourth = grad_query
    half, tiny = candidate.shape[0] // 2, candidate.dtype.type(SMALLEST_SQUARE)
    for k in range(half):
        real, imaginary = candidate[k], candidate[k + half]
        real0, imaginary0 = first[k] - real, first[k + half] - imaginary
        real1, imaginary1 = second[k] - real, second[k + half] - imaginary
        real2, imaginary2 = third[k] - real, third[k + half] - imaginary
        real3, imaginary3 = fourth[k] - real, fourth[k + half] - imaginary
        # An addition, not a test for 0: the loop has no branch.
        weight0 = gradient[0] / np.sqrt(real0 * real0 + imaginary0 * imaginary0 + tiny)
        weight1 = gradient[1] / np.sqrt(real1 * real1 + imaginary1 * imaginary1 + tiny)
        weight2 = gradient[2] / np.sqrt(real2 * real2 + imaginary2 * imaginary2 + tiny)
        weight3 = gradient[3] / np.sqrt(real3 * real3 + imaginary3 * imaginary3 + tiny)
        grad_first[k] += weight0 * real0
        grad_second[k] += weight1 * real1
        grad_third[k] += weight2 * real2
        grad_fourth[k] += weight3 * real3
        grad_first[k + half] += weight0 * imaginary0
        grad_second[k + half] += weight1 * imaginary1
        grad_third[k + half] += weight2 * imaginary2
        grad_fourth[k + half] += weight3 * imaginary3
        grad_candidate[k] -= (weight0 * real0 + weight1 * real1) + (weight2 * real2 + weight3 * real3)
        grad_candidate[k + half] -= (weight0 * imaginary0 + weight1 * imaginary1) + (
            weight2 * imaginary2 + weight3 * imaginary3
        )


@compiled_unaliased
def _four_manhattan_distances(query: ndarray, candidate: tuple, zero: float) -> tuple:
    """Return the distances of a query "(D,)" to four candidates, a tuple of rows."""
    first, second, third, fourth = candidate
    total0, total1, total2, total3 = zero, zero, zero, zero
    for k in range(query.shape[0]):
        number = query[k]
        total0 += abs(number - first[k])
        total1 += abs(number - second[k])
        total2 += abs(number - third[k])
        total3 += abs(number - fourth[k])
    return total0, total1, total2, total3


@compiled
def fill_manhattan(query: ndarray, candidates: ndarray, distances: ndarray) -> None:
    """Write sum_k |q_k - c_k| of all pairs: (B, D), (N, D) -> (B, N); N is a multiple of AT_ONCE."""
    zero = query.dtype.type(0)
    for first in range(0, len(candidates), CANDIDATE_BLOCK):
        for i in range(len(query)):
            for j in range(first, min(first + CANDIDATE_BLOCK, len(candidates)), AT_ONCE):
                totals = _four_manhattan_distances(
                    query[i], (candidates[j], candidates[j + 1], candidates[j + 2], candidates[j + 3]), zero
                )
                distances[i, j], distances[i, j + 1], distances[i, j + 2], distances[i, j + 3] = totals


@compiled_unaliased
def _add_four_signs(
    query: tuple, candidate: ndarray, gradient: tuple, grad_query: tuple, grad_candidate: ndarray
) -> None:
    """Add the gradients of four queries, tuples of rows "(D,)", and one candidate; 0 where a term is 0."""
    first, second, third, fourth = query
    grad_first, grad_second, grad_third, grad_fourth = grad_query
    plus0, plus1, plus2, plus3 = gradient
    zero = plus0 - plus0
    for k in range(candidate.shape[0]):
        number = candidate[k]
        difference0, difference1 = first[k] - number, second[k] - number
        difference2, difference3 = third[k] - number, fourth[k] - number
        weight0 = plus0 if difference0 > 0 else (-plus0 if difference0 < 0 else zero)
        weight1 = plus1 if difference1 > 0 else (-plus1 if difference1 < 0 else zero)
        weight2 = plus2 if difference2 > 0 else (-plus2 if difference2 < 0 else zero)
        weight3 = plus3 if difference3 > 0 else (-plus3 if difference3 < 0 else zero)
        grad_first[k] += weight0
        grad_second[k] += weight1
        grad_third[k] += weight2
        grad_fourth[k] += weight3
        grad_candidate[k] -= (weight0 + weight1) + (weight2 + weight3)


def _gradient_loop(name: str, add_four: Callable) -> Callable:
    """Compile the loop that adds the gradients of all rows, given those g (B, N) of the distances.

    B is a multiple of AT_ONCE: ``add_four`` adds what four queries and a candidate give.
    """

    def add(
        query: ndarray, candidates: ndarray, gradient: ndarray, grad_query: ndarray, grad_candidates: ndarray
    ) -> None:
        for first in range(0, len(candidates), GRADIENT_BLOCK):
            for i in range(0, len(query), AT_ONCE):
                for j in range(first, min(first + GRADIENT_BLOCK, len(candidates))):
                    add_four(
                        (query[i], query[i + 1], query[i + 2], query[i + 3]),
                        candidates[j],
                        (gradient[i, j], gradient[i + 1, j], gradient[i + 2, j], gradient[i + 3, j]),
                        (grad_query[i], grad_query[i + 1], grad_query[i + 2], grad_query[i + 3]),
                        grad_candidates[j],
                    )

    # The name is that of the cache's file, and the one that profilers show.
    add.__name__ = add.__qualname__ = name
    return compiled(add)


#: g_ij (q_ik - c_jk) / |q_ik - c_jk| for query i, minus it for candidate j.
add_modulus_gradients = _gradient_loop("add_modulus_gradients", _add_four_moduli)
#: g_ij sign(q_ik - c_jk) for query i, minus it for candidate j.
add_manhattan_gradients = _gradient_loop("add_manhattan_gradients", _add_four_signs)


@compiled
def fill_euclidean(
    products: ndarray, query_squares: ndarray, candidate_squares: ndarray, distances: ndarray
) -> None:
    """Write sqrt(|q|^2 + |c|^2 - 2 q.c), 0 where rounding makes the square negative.

    ``products`` "(B, N)" are of the type of the distances "(B, N)" or bfloat16 words; squares are "(B,)",
    "(N,)".
    """
    kind = distances.dtype.type
    for i in range(products.shape[0]):
        row = distances[i]
        load_row(products[i], row)
        for j in range(row.shape[0]):
            square = query_squares[i] + candidate_squares[j] - kind(2) * row[j]
            # A comparison that is false for NaN, which stays.
            row[j] = np.sqrt(kind(0) if square < kind(0) else square)


@compiled
def fill_euclidean_weights(
    gradients: ndarray, distances: ndarray, squares: tuple, noise: float, weights: ndarray, sums: tuple
) -> None:
    """Write each gradient of a distance divided by the distance, "(B, N)", and the sums of these weights.

    A weight is 0 where the squared distance is at most the share ``noise`` of both squared lengths. The
    weights are of the type of the distances, or bfloat16 words.
    """
    query_squares, candidate_squares = squares
    query_sums, candidate_sums = sums
    kind = distances.dtype.type
    one = kind(1)
    row = np.empty(distances.shape[1], distances.dtype)
    candidate_sums[:] = kind(0)
    for i in range(distances.shape[0]):
        total = kind(0)
        for j in range(row.shape[0]):
            distance = distances[i, j]
            is_noise = distance * distance <= noise * (query_squares[i] + candidate_squares[j])
            weight = kind(0) if is_noise else gradients[i, j] / (one if is_noise else distance)
            row[j] = weight
            total += weight
            candidate_sums[j] += weight
        query_sums[i] = total
        store_row(row, one, weights[i])


SCALED_BLOCK = 32
"""Candidates in a block: all queries use it before the next, so that rows and gradients stay in cache."""


@compiled
def fill_scaled_distances(offset: ndarray, scale: ndarray, candidates: ndarray, distances: ndarray) -> None:
    """Write sum_k |a_k - s_k c_k| of all pairs: offsets a, scales s (B, D), candidates (N, D) -> (B, N)."""
    for first in range(0, len(candidates), SCALED_BLOCK):
        for i in range(len(offset)):
            for j in range(first, min(first + SCALED_BLOCK, len(candidates))):
                total = offset.dtype.type(0)
                for k in range(offset.shape[1]):
                    total += abs(offset[i, k] - scale[i, k] * candidates[j, k])
                distances[i, j] = total


@compiled_unaliased
def _add_scaled(
    offset: ndarray, scale: ndarray, candidate: ndarray, gradient: float,
    grad_offset: ndarray, grad_scale: ndarray, grad_candidate: ndarray,
) -> None:  # fmt: skip
    """Add the gradients of one pair; rows "(D,)"."""
    zero = gradient - gradient
    for k in range(offset.shape[0]):
        difference = offset[k] - scale[k] * candidate[k]
        weight = gradient if difference > 0 else (-gradient if difference < 0 else zero)
        grad_offset[k] += weight
        grad_scale[k] -= weight * candidate[k]
        grad_candidate[k] -= weight * scale[k]


@compiled
def add_scaled_gradients(rows: tuple, gradients: ndarray, grad_rows: tuple) -> None:
    """Add the gradients of all rows, given those of the distances (B, N); 0 where a term is 0."""
    offset, scale, candidates = rows
    grad_offset, grad_scale, grad_candidates = grad_rows
    for first in range(0, len(candidates), SCALED_BLOCK):
        for i in range(len(offset)):
            for j in range(first, min(first + SCALED_BLOCK, len(candidates))):
                _add_scaled(
                    offset[i], scale[i], candidates[j], gradients[i, j],
                    grad_offset[i], grad_scale[i], grad_candidates[j],
                )  # fmt: skip
