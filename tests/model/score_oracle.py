"""The score functions as their papers write them, one Python number at a time."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable

from dglkge.model.score_functions import SCORE_FUNCTIONS
from tests.model.dense_oracle import DENSE, Row, numbers


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
    triples = zip(numbers(head), numbers(relation), numbers(tail))
    return sum((h * r * t.conjugate()).real for h, r, t in triples)


def rotate(head: Row, phases: Row, tail: Row) -> float:
    """Sun et al. 2019."""
    return -sum(abs(h * cmath.exp(1j * r) - t) for h, r, t in zip(numbers(head), phases, numbers(tail)))


def rescal(head: Row, matrix: Row, tail: Row) -> float:
    """Nickel et al. 2011: the relation is a matrix, row by row."""
    dim = len(head)
    total = 0.0
    for i in range(dim):
        for j in range(dim):
            total += head[i] * matrix[i * dim + j] * tail[j]
    return total


def simple(head: Row, relation: Row, tail: Row) -> float:
    """Kazemi and Poole 2018: [as head, as tail], [forward, backward]."""
    half = len(head) // 2
    total = 0.0
    for k in range(half):
        total += head[k] * relation[k] * tail[half + k]
        total += tail[k] * relation[half + k] * head[half + k]
    return total / 2


def de_simple(head: Row, relation: Row, tail: Row) -> float:
    """Goel et al. 2020, eq. 1, in SimplE: halves [constant, amplitudes, frequencies, phases]; [r, r', time].

    As many amplitudes as make 64 % of a half at a time change, rounded down.
    """
    half, time = len(head) // 2, relation[-1]
    changing = int(half / (2 + 1 / 0.64))
    constant = half - 3 * changing

    def at_time(row: Row) -> Row:
        moved = []
        for part in (row[:half], row[half:]):
            parts = [part[constant + i * changing : constant + (i + 1) * changing] for i in range(3)]
            moved += part[:constant] + [a * math.sin(w * time + b) for a, w, b in zip(*parts)]
        return moved

    return simple(at_time(head), relation[:-1], at_time(tail))


def quate(head: Row, relation: Row, tail: Row) -> float:
    """Zhang et al. 2019, by the table of products of 1, i, j and k."""
    # (a, b): the place and the sign of the product of base a and base b.
    table = [
        [(0, 1), (1, 1), (2, 1), (3, 1)],
        [(1, 1), (0, -1), (3, 1), (2, -1)],
        [(2, 1), (3, -1), (0, -1), (1, 1)],
        [(3, 1), (2, 1), (1, -1), (0, -1)],
    ]
    num = len(head) // 4
    total = 0.0
    for k in range(num):
        norm = math.sqrt(sum(relation[part * num + k] ** 2 for part in range(4)))
        for a in range(4):
            for b in range(4):
                place, sign = table[a][b]
                # A quaternion 0 has no direction.
                factor = relation[b * num + k] / norm if norm else 0.0
                total += sign * head[a * num + k] * factor * tail[place * num + k]
    return total


def clifford(head: Row, relation: Row, tail: Row, p: int, q: int) -> float:
    """Demir and Ngonga Ngomo 2023, from the rules of the algebra: bases are sets of basis vectors."""
    bases = [(), *((i,) for i in range(p + q))]
    num = len(head) // len(bases)
    total = 0.0
    for k in range(num):
        product: dict[tuple[int, ...], float] = {}
        for a, left in enumerate(bases):
            for b, right in enumerate(bases):
                both, sign = (*left, *right), 1.0
                if len(both) == 2 and both[0] == both[1]:
                    both, sign = (), (1.0 if both[0] < p else -1.0)
                elif len(both) == 2 and both[0] > both[1]:
                    both, sign = (both[1], both[0]), -1.0
                term = sign * head[a * num + k] * relation[b * num + k]
                product[both] = product.get(both, 0.0) + term
        total += sum(product[base] * tail[a * num + k] for a, base in enumerate(bases))
    return total


def pairre(head: Row, relation: Row, tail: Row) -> float:
    """Chao et al. 2021."""
    dim = len(head)
    h, t = unit(head), unit(tail)
    return -sum(abs(h[k] * relation[k] - t[k] * relation[dim + k]) for k in range(dim))


def triplere(head: Row, relation: Row, tail: Row) -> float:
    """Yu et al. 2022: [scaling of heads, translation, scaling of tails]."""
    dim = len(head)
    h, t = unit(head), unit(tail)
    total = 0.0
    for k in range(dim):
        total += abs(h[k] * relation[k] - t[k] * relation[2 * dim + k] + relation[dim + k])
    return -total


def unit(row: Row) -> Row:
    """Divide a row by its norm, but for 0."""
    norm = math.sqrt(sum(x * x for x in row))
    return [x / norm for x in row] if norm else row


def projected(head: Row, relation: Row, tail: Row) -> Row:
    """Lin et al. 2015: h M + r - t M of [r, the rows of M]."""
    dim = len(head)
    point = []
    for j in range(dim):
        total = relation[j]
        for i in range(dim):
            total += head[i] * relation[dim + i * dim + j]
            total -= tail[i] * relation[dim + i * dim + j]
        point.append(total)
    return point


def transr(head: Row, relation: Row, tail: Row) -> float:
    """Lin et al. 2015, without the square."""
    return -math.sqrt(sum(x * x for x in projected(head, relation, tail)))


def transr_l1(head: Row, relation: Row, tail: Row) -> float:
    """DGL-KE's, without gamma."""
    return -sum(abs(x) for x in projected(head, relation, tail))


def keci(head: Row, relation: Row, tail: Row) -> float:
    """Keci with its default options."""
    return clifford(head, relation, tail, 0, 1)


ORACLES: dict[str, Callable[[Row, Row, Row], float]] = {
    "transe_l1": transe_l1,
    "transe_l2": transe_l2,
    "distmult": distmult,
    "complex": complex_,
    "rotate": rotate,
    "rescal": rescal,
    "simple": simple,
    "de_simple": de_simple,
    "quate": quate,
    "keci": keci,
    "pairre": pairre,
    "triplere": triplere,
    "transr": transr,
    "transr_l1": transr_l1,
    **DENSE,
}

NOT_ON_A_GRID = {"rotate", "quate", "de_simple", "pairre", "triplere", *DENSE}
"""Score functions that turn whole numbers into others."""


def fitting_dim(name: str, dim: int) -> int:
    """Return the least dimension from one on that a score function has rows of."""
    function = SCORE_FUNCTIONS.get(name)()
    while function.other_dims(dim):
        dim += 1
    return dim


def float64_score(name: str, head: Row, relation: Row, tail: Row) -> float:
    """Score one triple of rows."""
    return ORACLES[name](head, relation, tail)
