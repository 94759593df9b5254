"""Compiled loops that add the gradients of penalties on the rows of triples, and on products of them.

With a the entity given and r the relation, a o r multiplies them number by number, real or complex.
Conjugation changes no modulus, so that both queries of a triple have the same loops:

    sum |x|^2: 2 x        sum |x|^3: 3 |x| x        sum |a o r|^2: of a: 2 |r|^2 a, of r: 2 |a|^2 r
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from dglkge.kernels.jit import compiled, compiled_unaliased
from dglkge.kernels.rows import LOOKAHEAD, prefetch_rows_at, row_at


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
    anchor: ndarray,
    relation: ndarray,
    factor: float,
    is_complex: bool,
    of_anchor: ndarray,
    of_relation: ndarray,
) -> float:
    """Add factor times the gradients of the squares of anchor o relation; returns the sum of the squares."""
    total = anchor.dtype.type(0)
    twice = factor + factor
    if not is_complex:
        for k in range(anchor.shape[0]):
            of_anchor[k] += twice * relation[k] * relation[k] * anchor[k]
            of_relation[k] += twice * anchor[k] * anchor[k] * relation[k]
            total += anchor[k] * anchor[k] * relation[k] * relation[k]
        return total
    half = anchor.shape[0] // 2
    for k in range(half):
        of_a = anchor[k] * anchor[k] + anchor[half + k] * anchor[half + k]
        of_r = relation[k] * relation[k] + relation[half + k] * relation[half + k]
        of_anchor[k] += twice * of_r * anchor[k]
        of_anchor[half + k] += twice * of_r * anchor[half + k]
        of_relation[k] += twice * of_a * relation[k]
        of_relation[half + k] += twice * of_a * relation[half + k]
        total += of_a * of_r
    return total


@compiled
def add_penalties(
    rows: tuple, operator: tuple, dim: int, factors: ndarray, power: int, weights: tuple, gradients: tuple
) -> float:
    """Add the gradients of both queries' penalties of each triple; returns the penalties' sum.

    Parameters
    ----------
    rows : three ndarray
        "(B,) int64" addresses of the float32 rows of heads, tails and relations.
    operator : tuple
        (is_complex, is_reciprocal).
    dim : int
        D.
    factors : ndarray
        "(B,)" factor of each triple.
    power : int
        2 or 3, of the moduli.
    weights : tuple
        float32: of each entity's row in a triple, of each query's relation, of each query's product.
    gradients : three ndarray
        "(B,) int64" addresses of theirs, added to.
    """
    is_complex, is_reciprocal = operator
    heads, tails, relations = rows
    of_heads, of_tails, of_relations = gradients
    of_entity, of_relation, of_product = weights
    width = 2 * dim if is_reciprocal else dim
    last = width - dim
    penalty = 0.0
    for i in range(heads.shape[0]):
        prefetch_rows_at(heads, i + LOOKAHEAD, dim)
        prefetch_rows_at(tails, i + LOOKAHEAD, dim)
        head, tail = row_at(heads[i], dim, factors), row_at(tails[i], dim, factors)
        relation = row_at(relations[i], width, factors)
        head_gradient, tail_gradient = row_at(of_heads[i], dim, factors), row_at(of_tails[i], dim, factors)
        relation_gradient = row_at(of_relations[i], width, factors)
        # Reciprocal: each half serves one query. Otherwise the row serves both.
        once = of_relation if is_reciprocal else of_relation + of_relation
        for row, weight, gradient in (
            (head, of_entity, head_gradient),
            (tail, of_entity, tail_gradient),
            (relation, once, relation_gradient),
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
        if of_product != 0:
            factor = of_product * factors[i]
            penalty += factor * add_product_squares(
                head, relation[:dim], factor, is_complex, head_gradient, relation_gradient[:dim]
            )
            penalty += factor * add_product_squares(
                tail, relation[last:], factor, is_complex, tail_gradient, relation_gradient[last:]
            )
    return penalty
