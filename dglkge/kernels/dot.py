"""Compiled loops of a batch's queries under DistMult and ComplEx: forward, gradients written out, penalties.

With q = a o r the query of anchor a and relation r (o multiplies number by number, real or complex), g the
gradient of q, t the true answer, m and s the gradients of the scores q.t and q.a:

    gradient of a: g o conj(r) + s q     of r: g o conj(a)     of t: m q

where g is m t + s a plus the contribution of the negatives. Without reciprocal relations the query for the
head has the conjugated relation: q = a o conj(r); the gradient of a is then g o r + s q, of r a o conj(g).
``rows`` = (heads, tails, relations) "(B,) int64" are the addresses of the batch's float32 rows, see
:class:`FoundRows`. ``operator`` = (is_complex, is_reciprocal), ``operand`` arrays hold float32 or bfloat16
words. ``places`` = (tails, heads) "(B,) int64" are the rows of the operand that hold each edge's query for
its tail and for its head, in any order.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from dglkge.kernels.jit import compiled, compiled_inline, compiled_unaliased
from dglkge.kernels.rows import LOOKAHEAD, load_row, prefetch_rows_at, row_at, store_row


@compiled_unaliased
def query_of(anchor: ndarray, relation: ndarray, is_complex: bool, conjugate: bool, query: ndarray) -> None:
    """Write anchor o relation, or anchor o conj(relation), rows "(D,)"."""
    if not is_complex:
        for k in range(query.shape[0]):
            query[k] = anchor[k] * relation[k]
        return
    half = query.shape[0] // 2
    sign = query.dtype.type(-1 if conjugate else 1)
    for k in range(half):
        real, imaginary = relation[k], sign * relation[half + k]
        query[k] = anchor[k] * real - anchor[half + k] * imaginary
        query[half + k] = anchor[k] * imaginary + anchor[half + k] * real


@compiled_inline
def inner_product(left: ndarray, right: ndarray) -> float:
    """Return the inner product of two rows."""
    total = left.dtype.type(0)
    for k in range(left.shape[0]):
        total += left[k] * right[k]
    return total


@compiled
def gather(rows: ndarray, operand: ndarray) -> None:
    """Copy rows into the operand of a matrix product."""
    num, dim = operand.shape
    like = np.empty(0, np.float32)
    one = like.dtype.type(1)
    for i in range(num):
        prefetch_rows_at(rows, i + LOOKAHEAD, dim)
        store_row(row_at(rows[i], dim, like), one, operand[i])


@compiled_inline
def rows_of(addresses: tuple, i: int, dim: int, width: int, like: ndarray) -> tuple:
    """Return the rows at the addresses of edge i: head and tail of width ``dim``, relation of ``width``."""
    heads, tails, relations = addresses
    return row_at(heads[i], dim, like), row_at(tails[i], dim, like), row_at(relations[i], width, like)


@compiled_inline
def prefetch_entities(addresses: tuple, i: int, dim: int) -> None:
    """Prefetch head and tail of an edge that comes soon after edge i."""
    prefetch_rows_at(addresses[0], i + LOOKAHEAD, dim)
    prefetch_rows_at(addresses[1], i + LOOKAHEAD, dim)


@compiled
def make_queries(
    rows: tuple, operator: tuple, places: tuple, operand: ndarray, positive: ndarray, own_scores: ndarray
) -> None:
    """Write the queries (Q, D), and the scores "(Q,)" of their true and own entities."""
    is_complex, is_reciprocal = operator
    num, dim = rows[0].shape[0], operand.shape[1]
    width = 2 * dim if is_reciprocal else dim
    query = np.empty(dim, positive.dtype)
    one = positive.dtype.type(1)
    for i in range(num):
        prefetch_entities(rows, i, dim)
        head, tail, relation = rows_of(rows, i, dim, width, positive)
        query_of(head, relation[:dim], is_complex, False, query)
        place = places[0][i]
        positive[place], own_scores[place] = inner_product(query, tail), inner_product(query, head)
        store_row(query, one, operand[place])
        # The second half of a reciprocal row; otherwise width == dim and it is the whole row, conjugated.
        query_of(tail, relation[width - dim :], is_complex, not is_reciprocal, query)
        place = places[1][i]
        positive[place], own_scores[place] = inner_product(query, head), inner_product(query, tail)
        store_row(query, one, operand[place])


@compiled_inline
def penalize(row: ndarray, factor: float, is_complex: bool, gradient: ndarray) -> float:
    """Write factor times the gradient of N3 of a row; returns N3 (see :class:`model.regularizers.N3`)."""
    total = row.dtype.type(0)
    if factor == 0:
        gradient[:] = 0
        return total
    factor = row.dtype.type(3) * factor
    if not is_complex:
        for k in range(row.shape[0]):
            modulus = np.abs(row[k])
            gradient[k] = factor * modulus * row[k]
            total += modulus * modulus * modulus
        return total
    half = row.shape[0] // 2
    real, imaginary = row[:half], row[half:]
    grad_real, grad_imaginary = gradient[:half], gradient[half:]
    for k in range(half):
        square = real[k] * real[k] + imaginary[k] * imaginary[k]
        modulus = np.sqrt(square)
        grad_real[k] = factor * modulus * real[k]
        grad_imaginary[k] = factor * modulus * imaginary[k]
        total += square * modulus
    return total


# Seven arrays: that they do not overlap is promised of arguments, not of the members of a tuple.
@compiled_unaliased
def add_query_gradients(
    anchor: ndarray, relation: ndarray, truth: ndarray, grad_query: ndarray,
    grad_anchor: ndarray, grad_relation: ndarray, grad_truth: ndarray, numbers: tuple,
) -> None:  # fmt: skip
    """Add the gradients of a query's three rows; ``grad_query`` holds the contribution of the negatives.

    ``numbers`` = (is_complex, conjugate, gradients of the scores of the true answer and of the own entity).
    """
    is_complex, conjugate, missing, own_share = numbers
    if not is_complex:
        for k in range(anchor.shape[0]):
            query = anchor[k] * relation[k]
            g = grad_query[k] + missing * truth[k] + own_share * anchor[k]
            grad_truth[k] += missing * query
            grad_anchor[k] += own_share * query + g * relation[k]
            grad_relation[k] += g * anchor[k]
        return
    half = anchor.shape[0] // 2
    sign = anchor.dtype.type(-1 if conjugate else 1)
    for k in range(half):
        a_real, a_imaginary = anchor[k], anchor[half + k]
        r_real, r_imaginary = relation[k], sign * relation[half + k]
        query_real = a_real * r_real - a_imaginary * r_imaginary
        query_imaginary = a_real * r_imaginary + a_imaginary * r_real
        g_real = grad_query[k] + missing * truth[k] + own_share * a_real
        g_imaginary = grad_query[half + k] + missing * truth[half + k] + own_share * a_imaginary
        grad_truth[k] += missing * query_real
        grad_truth[half + k] += missing * query_imaginary
        grad_anchor[k] += own_share * query_real + g_real * r_real + g_imaginary * r_imaginary
        grad_anchor[half + k] += own_share * query_imaginary + g_imaginary * r_real - g_real * r_imaginary
        grad_relation[k] += g_real * a_real + g_imaginary * a_imaginary
        grad_relation[half + k] += sign * (g_imaginary * a_real - g_real * a_imaginary)


@compiled
def write_gradients(
    rows: tuple, operator: tuple, places: tuple, grad_queries: ndarray,
    grad_scores: tuple, factors: ndarray, n3: float, gradients: tuple,
) -> float:  # fmt: skip
    """Write the gradients of the batch's rows; returns the sum of the triples' penalties times their factors.

    Parameters
    ----------
    grad_queries : ndarray
        "(Q, D)" operand: contribution of the negatives to the gradients of the queries.
    grad_scores : two ndarray
        "(Q,)" gradients of the scores of the true answers and of the own entities.
    factors : ndarray
        "(B,)" factor of each triple's loss in the gradient.
    n3 : float
        Weight of the regularizer, 0 for none; it counts the three rows of a triple once for each side.
    gradients : three ndarray
        "(B,) int64" addresses of those of heads, tails and relations, written.
    """
    is_complex, is_reciprocal = operator
    missing, own_shares = grad_scores
    dim = grad_queries.shape[1]
    width = 2 * dim if is_reciprocal else dim
    last = width - dim
    kind = factors.dtype.type
    grad_query = np.empty(dim, factors.dtype)
    penalty = 0.0
    for i in range(rows[0].shape[0]):
        prefetch_entities(rows, i, dim)
        head, tail, relation = rows_of(rows, i, dim, width, factors)
        grad_head, grad_tail, grad_relation = rows_of(gradients, i, dim, width, factors)
        # Each entity is regularized in both queries of its triple, a reciprocal half only in its own.
        once = kind(n3) * factors[i]
        twice = once + once
        cubes = kind(2) * penalize(head, twice, is_complex, grad_head)
        cubes += kind(2) * penalize(tail, twice, is_complex, grad_tail)
        if is_reciprocal:
            cubes += penalize(relation[:dim], once, is_complex, grad_relation[:dim])
            cubes += penalize(relation[last:], once, is_complex, grad_relation[last:])
        else:
            cubes += kind(2) * penalize(relation, twice, is_complex, grad_relation)
        penalty += once * cubes
        place = places[0][i]
        load_row(grad_queries[place], grad_query)
        add_query_gradients(
            head, relation[:dim], tail, grad_query, grad_head, grad_relation[:dim], grad_tail,
            (is_complex, False, missing[place], own_shares[place]),
        )  # fmt: skip
        place = places[1][i]
        load_row(grad_queries[place], grad_query)
        add_query_gradients(
            tail, relation[last:], head, grad_query, grad_tail, grad_relation[last:], grad_head,
            (is_complex, not is_reciprocal, missing[place], own_shares[place]),
        )  # fmt: skip
    return penalty


@compiled_unaliased
def add_squares(row: ndarray, factor: float, gradient: ndarray) -> float:
    """Add factor times the gradient of the sum of a row's squares; returns the sum."""
    total = row.dtype.type(0)
    twice = factor + factor
    for k in range(row.shape[0]):
        gradient[k] += twice * row[k]
        total += row[k] * row[k]
    return total


@compiled_unaliased
def add_cubes(row: ndarray, factor: float, is_complex: bool, gradient: ndarray) -> float:
    """Add factor times the gradient of the sum of a row's cubed moduli; returns the sum."""
    total = row.dtype.type(0)
    three = row.dtype.type(3) * factor
    if not is_complex:
        for k in range(row.shape[0]):
            modulus = np.abs(row[k])
            gradient[k] += three * modulus * row[k]
            total += modulus * modulus * modulus
        return total
    half = row.shape[0] // 2
    for k in range(half):
        square = row[k] * row[k] + row[half + k] * row[half + k]
        modulus = np.sqrt(square)
        gradient[k] += three * modulus * row[k]
        gradient[half + k] += three * modulus * row[half + k]
        total += square * modulus
    return total


@compiled_unaliased
def add_product_squares(
    anchor: ndarray, relation: ndarray, factor: float, is_complex: bool,
    grad_anchor: ndarray, grad_relation: ndarray,
) -> float:  # fmt: skip
    """Add factor times the gradients of the squares of anchor o relation; returns the sum of the squares."""
    total = anchor.dtype.type(0)
    twice = factor + factor
    if not is_complex:
        for k in range(anchor.shape[0]):
            grad_anchor[k] += twice * relation[k] * relation[k] * anchor[k]
            grad_relation[k] += twice * anchor[k] * anchor[k] * relation[k]
            total += anchor[k] * anchor[k] * relation[k] * relation[k]
        return total
    half = anchor.shape[0] // 2
    for k in range(half):
        a_square = anchor[k] * anchor[k] + anchor[half + k] * anchor[half + k]
        r_square = relation[k] * relation[k] + relation[half + k] * relation[half + k]
        grad_anchor[k] += twice * r_square * anchor[k]
        grad_anchor[half + k] += twice * r_square * anchor[half + k]
        grad_relation[k] += twice * a_square * relation[k]
        grad_relation[half + k] += twice * a_square * relation[half + k]
        total += a_square * r_square
    return total


@compiled
def add_penalties(
    rows: tuple, operator: tuple, dim: int, factors: ndarray, power: int, weights: tuple, gradients: tuple
) -> float:
    """Add the gradients of both queries' penalties of each triple; returns the penalties' sum.

    With a the entity given and r the relation, conjugation changes no modulus, so both queries have the same
    loops: sum |x|^2 has the gradient 2 x, sum |x|^3 has 3 |x| x, and sum |a o r|^2 has 2 |r|^2 a and 2 |a|^2
    r.

    Parameters
    ----------
    rows, gradients : three ndarray
        Addresses, as in :func:`write_gradients`; gradients are added to.
    factors : ndarray
        "(B,)" factor of each triple.
    power : int
        2 or 3, of the moduli.
    weights : tuple
        float32: of each entity's row in a triple, of each query's relation, of each query's product.
    """
    is_complex, is_reciprocal = operator
    entity_weight, relation_weight, product_weight = weights
    width = 2 * dim if is_reciprocal else dim
    last = width - dim
    penalty = 0.0
    for i in range(rows[0].shape[0]):
        prefetch_entities(rows, i, dim)
        head, tail, relation = rows_of(rows, i, dim, width, factors)
        grad_head, grad_tail, grad_relation = rows_of(gradients, i, dim, width, factors)
        # Reciprocal: each half serves one query. Otherwise the row serves both.
        once = relation_weight if is_reciprocal else relation_weight + relation_weight
        for row, weight, gradient in (
            (head, entity_weight, grad_head),
            (tail, entity_weight, grad_tail),
            (relation, once, grad_relation),
        ):
            if weight == 0:
                continue
            factor = weight * factors[i]
            if power == 2:
                penalty += factor * add_squares(row, factor, gradient)
            elif is_complex and row.shape[0] > dim:
                penalty += factor * add_cubes(row[:dim], factor, True, gradient[:dim])
                penalty += factor * add_cubes(row[dim:], factor, True, gradient[dim:])
            else:
                penalty += factor * add_cubes(row, factor, is_complex, gradient)
        if product_weight != 0:
            factor = product_weight * factors[i]
            penalty += factor * add_product_squares(
                head, relation[:dim], factor, is_complex, grad_head, grad_relation[:dim]
            )
            penalty += factor * add_product_squares(
                tail, relation[last:], factor, is_complex, grad_tail, grad_relation[last:]
            )
    return penalty
