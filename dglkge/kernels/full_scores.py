"""Compiled loops over the scores of queries against all rows of a shard.

True answers are handled apart from the matrix of scores: their scores and gradients are float32 also where
the products are bfloat16, and the matrix holds 0 in their places when it is multiplied. ``starts``
"(Q + 1,) int64" and ``places`` "(A,) int64" list them in CSR form: those of query i are
``places[starts[i]:starts[i + 1]]``, rows of the shard.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from dglkge.kernels.dot import inner_product
from dglkge.kernels.jit import FAST_MATH, compiled, overload, types
from dglkge.kernels.losses import greatest_of, power
from dglkge.kernels.rows import load_row, store_row, widen

LOGARITHM_EVERY = 64
"""Factors between 1 and 2 that are multiplied before a logarithm is taken: 2^64 is far from overflow."""


SCORES_A_PIECE = 512
"""Scores that a loop holds as float32 at a time: 2 KiB, which stay in the first-level cache."""


def greatest_score(row: ndarray) -> Any:
    """Return the greatest of a row of float32 numbers or of bfloat16 words, as float32."""
    raise NotImplementedError("for compiled loops only")


@overload(greatest_score, jit_options={"fastmath": FAST_MATH})
def _greatest_score(row: Any) -> Any:
    if row.dtype != types.uint16:

        def greatest_number(row: Any) -> Any:
            return greatest_of(row)

        return greatest_number

    def greatest_word(row: Any) -> Any:
        # As in greatest_of, compared as integers in the same order, and twice as many to a vector.
        greatest = np.int16(-32768)
        for j in range(row.shape[0]):
            word = np.int16(row[j])
            greatest = max(greatest, np.int16(word ^ ((word >> np.int16(15)) & np.int16(0x7FFF))))
        return widen(np.uint16(greatest ^ ((greatest >> np.int16(15)) & np.int16(0x7FFF))))

    return greatest_word


@compiled
def exponentials(scores: ndarray, greatest: ndarray, totals: ndarray) -> None:
    """Replace scores "(Q, W)", float32 or bfloat16 words, by e to the power of score minus the row's greatest
    one.

    Writes the greatest score and the sum of the powers of each row "(Q,) float32". A sum is NaN where a score
    of its row is not finite.
    """
    zero, one = np.float32(0), np.float32(1)
    wide = np.empty(SCORES_A_PIECE, np.float32)
    for i in range(scores.shape[0]):
        top = greatest_score(scores[i])
        total = zero
        for start in range(0, scores.shape[1], SCORES_A_PIECE):
            piece = scores[i, start : start + SCORES_A_PIECE]
            row = wide[: piece.shape[0]]
            load_row(piece, row)
            for j in range(row.shape[0]):
                total += row[j] * zero
                row[j] = power(row[j] - top)
                total += row[j]
            store_row(row, one, piece)
        greatest[i], totals[i] = top, total


@compiled
def sigmoids(scores: ndarray, greatest: ndarray, totals: ndarray) -> None:
    """Replace scores "(Q, W)", float32 or bfloat16 words, by their sigmoids 1 / (1 + e^-s).

    Writes zeros and the sum of log(1 + e^s) of each row "(Q,) float32". A sum is NaN where a score of its row
    is not finite.
    """
    zero, one = np.float32(0), np.float32(1)
    row = np.empty(scores.shape[1], np.float32)
    for i in range(scores.shape[0]):
        load_row(scores[i], row)
        total = zero
        for start in range(0, row.shape[0], LOGARITHM_EVERY):
            part = row[start : start + LOGARITHM_EVERY]
            # log(1 + e^s) = max(s, 0) + log(1 + e^-|s|), and the logarithms' sum is that of a product: a call
            # of log for each score would keep the loop from being vectorised.
            product, sums = one, zero
            for j in range(part.shape[0]):
                score = part[j]
                sums += max(score, zero) + score * zero
                small = power(-np.abs(score))
                product *= one + small
                part[j] = (one if score > zero else small) / (one + small) + score * zero
            total += sums + np.log(product)
        greatest[i], totals[i] = zero, total
        store_row(row, one, scores[i])


@compiled
def score_answers(queries: ndarray, rows: ndarray, starts: ndarray, places: ndarray, scores: ndarray) -> None:
    """Write the inner products "(A,)" of queries "(Q, D)" with their answers among ``rows`` "(R, D)"."""
    for i in range(starts.shape[0] - 1):
        for k in range(starts[i], starts[i + 1]):
            scores[k] = inner_product(queries[i], rows[places[k]])


@compiled
def overwrite_answers(
    starts: ndarray, places: ndarray, first_row: int, value: float, scores: ndarray
) -> None:
    """Write a value to the answers' places in ``scores`` "(Q, W)"; column 0 is row ``first_row``."""
    width = scores.shape[1]
    for i in range(starts.shape[0] - 1):
        for k in range(starts[i], starts[i + 1]):
            column = places[k] - first_row
            if 0 <= column < width:
                scores[i, column] = value


@compiled
def add_answer_gradients(
    queries: ndarray, rows: ndarray, answers: tuple, grad: ndarray, grad_queries: ndarray, grad_rows: ndarray
) -> None:
    """Add the gradients through the answers' scores, with gradients ``grad`` "(A,)", to those of queries
    "(Q, D)" and rows "(R, D)".
    """
    starts, places = answers
    for i in range(starts.shape[0] - 1):
        query, grad_query = queries[i], grad_queries[i]
        for k in range(starts[i], starts[i + 1]):
            row, grad_row, share = rows[places[k]], grad_rows[places[k]], grad[k]
            for d in range(query.shape[0]):
                grad_query[d] += share * row[d]
                grad_row[d] += share * query[d]


@compiled
def narrow_rows(rows: ndarray, scales: ndarray, operand: ndarray) -> None:
    """Write each row of float32 numbers "(N, D)" times its scale "(N,)" to the operand of a product."""
    for i in range(rows.shape[0]):
        store_row(rows[i], scales[i], operand[i])


@compiled
def add_products(products: ndarray, keeps: ndarray, scales: ndarray, sums: ndarray) -> None:
    """Replace each row of ``sums`` "(N, D)" by keep times itself plus scale times the row of ``products``.

    A ``keep`` of 0 drops what the row held, whatever it was.
    """
    wide = np.empty(sums.shape[1], np.float32)
    for i in range(products.shape[0]):
        load_row(products[i], wide)
        keep, scale = keeps[i], scales[i]
        # Not keep * sums: the memory may be uninitialised, and 0 times NaN is NaN.
        if keep == 0:
            for d in range(wide.shape[0]):
                sums[i, d] = scale * wide[d]
        else:
            for d in range(wide.shape[0]):
                sums[i, d] = keep * sums[i, d] + scale * wide[d]


STRIP_COLUMNS = 128


@compiled
def count_scores(
    scores: ndarray, row_of: ndarray, low: ndarray, high: ndarray, num_greater: ndarray, num_close: ndarray
) -> None:
    """Count the scores above ``high`` and those in [low, high], for each true answer (K,)."""
    for k in range(len(row_of)):
        row = scores[row_of[k]]
        lowest, highest = low[k], high[k]
        greater, not_less = 0, 0
        # Two sums of comparisons and no branch: LLVM vectorises the loop.
        for column in range(len(row)):
            greater += row[column] > highest
            not_less += row[column] >= lowest
        num_greater[k] = greater
        num_close[k] = not_less - greater


@compiled
def list_close(
    scores: ndarray, row_of: ndarray, low: ndarray, high: ndarray, num_close: ndarray, columns: ndarray
) -> None:
    """Write the columns of the scores in [low, high], one true answer after another."""
    place = 0
    for k in range(len(row_of)):
        end = place + num_close[k]
        first = 0
        while place < end:
            # Most strips hold no close score; counting a strip is vectorised, listing its columns is not.
            strip = scores[row_of[k], first : first + STRIP_COLUMNS]
            num_in_strip = 0
            for column in range(len(strip)):
                num_in_strip += (strip[column] >= low[k]) & (strip[column] <= high[k])
            if num_in_strip > 0:
                for column in range(len(strip)):
                    if low[k] <= strip[column] <= high[k]:
                        columns[place] = first + column
                        place += 1
            first += STRIP_COLUMNS
