"""PyTorch-BigGraph's operators and comparators, one Python number at a time."""

from __future__ import annotations

import math

from tests.model.dense_oracle import Row, numbers


def operated(operator: str, row: Row, entity: Row) -> Row:
    """Return g_r(x), the parameters of the operator being the numbers of the row in their order."""
    dim = len(entity)
    if operator == "none":
        return entity
    if operator == "translation":
        return [x + b for x, b in zip(entity, row)]
    if operator == "diagonal":
        return [x * d for x, d in zip(entity, row)]
    if operator == "complex_diagonal":
        products = [x * z for x, z in zip(numbers(entity), numbers(row))]
        return [x.real for x in products] + [x.imag for x in products]
    result = [sum(row[dim * i + j] * entity[j] for j in range(dim)) for i in range(dim)]
    if operator == "affine":
        result = [x + row[dim * dim + i] for i, x in enumerate(result)]
    return result


def compared(comparator: str, left: Row, right: Row) -> float:
    """Return the score of two rows."""
    product = sum(x * y for x, y in zip(left, right))
    if comparator == "dot":
        return product
    if comparator == "cos":
        lengths = math.sqrt(sum(x * x for x in left)) * math.sqrt(sum(y * y for y in right))
        return product / lengths if lengths else 0.0
    square = sum((x - y) ** 2 for x, y in zip(left, right))
    return -square if comparator == "squared_l2" else -math.sqrt(square)


def biased(comparator: str, bias: bool, left: Row, right: Row) -> float:
    """Return the score, the first numbers being biases where there are some."""
    if not bias:
        return compared(comparator, left, right)
    return left[0] + right[0] + compared(comparator, left[1:], right[1:])


def static_score(pair: tuple[str, str, bool], head: Row, row: Row, tail: Row) -> float:
    """Return c(h, g_r(t))."""
    operator, comparator, bias = pair
    return biased(comparator, bias, head, operated(operator, row, tail))


def dynamic_score(pair: tuple[str, str, bool], anchor: Row, row: Row, answer: Row) -> float:
    """Return c(g_r(given), answer)."""
    operator, comparator, bias = pair
    return biased(comparator, bias, operated(operator, row, anchor), answer)
