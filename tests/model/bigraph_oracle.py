"""PyTorch-BigGraph's operators and comparators, for one pair of float64 rows at a time."""

from __future__ import annotations

import numpy as np

from tests.model.dense_oracle import Row, numbers


def operated(operator: str, row: Row, entity: Row) -> Row:
    """Return g_r(x), the parameters of the operator being the numbers of the row in their order."""
    dim = len(entity)
    if operator == "none":
        return entity
    if operator == "translation":
        return entity + row
    if operator == "diagonal":
        return entity * row
    if operator == "complex_diagonal":
        product = numbers(entity) * numbers(row)
        return np.concatenate([product.real, product.imag])
    result = row[: dim * dim].reshape(dim, dim) @ entity
    return result + row[dim * dim :] if operator == "affine" else result


def compared(comparator: str, left: Row, right: Row) -> float:
    """Return the score of two rows."""
    if comparator in ("dot", "cos"):
        lengths = np.linalg.norm(left) * np.linalg.norm(right) if comparator == "cos" else 1.0
        return left @ right / lengths if lengths else 0.0
    square = ((left - right) ** 2).sum()
    return -square if comparator == "squared_l2" else -np.sqrt(square)


def static_score(pair: tuple[str, str, bool], head: Row, row: Row, tail: Row) -> float:
    """Return c(h, g_r(t)), the first numbers being biases where there are some."""
    operator, comparator, bias = pair
    head, row, tail = (np.asarray(values, np.float64) for values in (head, row, tail))
    tail = operated(operator, row, tail)
    if bias:
        return head[0] + tail[0] + compared(comparator, head[1:], tail[1:])
    return compared(comparator, head, tail)


def dynamic_score(pair: tuple[str, str, bool], anchor: Row, row: Row, answer: Row) -> float:
    """Return c(g_r(anchor), answer)."""
    return static_score(pair, answer, row, anchor)
