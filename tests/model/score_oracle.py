"""The score functions as their papers write them, one Python number at a time."""

from __future__ import annotations

import cmath
import math
from typing import Callable

Row = list[float]


def transe_l1(head: Row, relation: Row, tail: Row) -> float:
    """Bordes et al. 2013."""
    return -sum(abs(h + r - t) for h, r, t in zip(head, relation, tail))


def transe_l2(head: Row, relation: Row, tail: Row) -> float:
    """Bordes et al. 2013."""
    return -math.sqrt(sum((h + r - t) ** 2 for h, r, t in zip(head, relation, tail)))


def distmult(head: Row, relation: Row, tail: Row) -> float:
    """Yang et al. 2015."""
    return sum(h * r * t for h, r, t in zip(head, relation, tail))


def complex_(head: Row, relation: Row, tail: Row) -> float:
    """Trouillon et al. 2016."""
    return sum(
        (h * r * t.conjugate()).real for h, r, t in zip(numbers(head), numbers(relation), numbers(tail))
    )


def rotate(head: Row, phases: Row, tail: Row) -> float:
    """Sun et al. 2019."""
    return -sum(abs(h * cmath.exp(1j * r) - t) for h, r, t in zip(numbers(head), phases, numbers(tail)))


def numbers(row: Row) -> list[complex]:
    """Read a row as complex numbers: first half real, second half imaginary."""
    half = len(row) // 2
    return [complex(real, imaginary) for real, imaginary in zip(row[:half], row[half:])]


ORACLES: dict[str, Callable[[Row, Row, Row], float]] = {
    "transe_l1": transe_l1,
    "transe_l2": transe_l2,
    "distmult": distmult,
    "complex": complex_,
    "rotate": rotate,
}


def float64_score(name: str, head: Row, relation: Row, tail: Row) -> float:
    """Score one triple of rows."""
    return ORACLES[name](head, relation, tail)
