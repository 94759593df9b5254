"""The score functions as their papers write them, one triple of float64 rows at a time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from dglkge.model.functions.bigraph_operators import OPERATORS
from dglkge.model.functions.bigraph_scores import BIAS, COMPARATORS, NAMED
from dglkge.model.score_functions import SCORE_FUNCTIONS
from tests.model.dense_oracle import DENSE, Row, numbers

_PAIRS = ("_".join(pair) for pair in itertools.product(OPERATORS, COMPARATORS))
BIGRAPH_NAMES = [pair + bias for pair in _PAIRS for bias in ("", BIAS) if pair + bias not in NAMED]
"""Pairs of an operator and a comparator that have no name of their own."""


def transe_l1(head: Row, relation: Row, tail: Row) -> float:
    """Bordes et al. 2013."""
    return -np.abs(head + relation - tail).sum()


def transe_l2(head: Row, relation: Row, tail: Row) -> float:
    """Bordes et al. 2013."""
    return -np.sqrt(((head + relation - tail) ** 2).sum())


def distmult(head: Row, relation: Row, tail: Row) -> float:
    """Yang et al. 2015."""
    return (head * relation * tail).sum()


def complex_(head: Row, relation: Row, tail: Row) -> float:
    """Trouillon et al. 2016."""
    return (numbers(head) * numbers(relation) * numbers(tail).conj()).sum().real


def rotate(head: Row, phases: Row, tail: Row) -> float:
    """Sun et al. 2019."""
    return -np.abs(numbers(head) * np.exp(1j * phases) - numbers(tail)).sum()


def rescal(head: Row, matrix: Row, tail: Row) -> float:
    """Nickel et al. 2011: the relation is a matrix, row by row."""
    return head @ matrix.reshape(len(head), -1) @ tail


def simple(head: Row, relation: Row, tail: Row) -> float:
    """Kazemi and Poole 2018: [as head, as tail], [forward, backward]."""
    (h, h_as_tail), (forward, backward), (t_as_head, t) = (np.split(row, 2) for row in (head, relation, tail))
    return ((h * forward * t).sum() + (t_as_head * backward * h_as_tail).sum()) / 2


def de_simple(head: Row, relation: Row, tail: Row) -> float:
    """Goel et al. 2020, eq. 1, in SimplE: halves [constant, amplitudes, frequencies, phases]; [r, r', time].

    As many amplitudes as make 64 % of a half at a time change, rounded down.
    """
    half = len(head) // 2
    changing = int(half / (2 + 1 / 0.64))
    constant = half - 3 * changing

    def at_time(row: Row) -> Row:
        moved = []
        for part in np.split(row, 2):
            amplitude, frequency, phase = np.split(part[constant:], 3)
            moved += [part[:constant], amplitude * np.sin(frequency * relation[-1] + phase)]
        return np.concatenate(moved)

    return simple(at_time(head), relation[:-1], at_time(tail))


PLACES = [[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]]
SIGNS = [[1, 1, 1, 1], [1, -1, 1, -1], [1, -1, -1, 1], [1, 1, -1, -1]]
"""Of the products of 1, i, j and k: i k = -j, so row 1, column 3 has place 2 and sign -1."""


def quate(head: Row, relation: Row, tail: Row) -> float:
    """Zhang et al. 2019, by the table of products; a quaternion 0 has no direction."""
    h, r, t = (row.reshape(4, -1) for row in (head, relation, tail))
    length = np.linalg.norm(r, axis=0)
    r = r / np.where(length > 0, length, 1)
    pairs = itertools.product(range(4), repeat=2)
    return sum((SIGNS[a][b] * h[a] * r[b] * t[PLACES[a][b]]).sum() for a, b in pairs)


def clifford(head: Row, relation: Row, tail: Row, p: int, q: int) -> float:
    """Demir and Ngonga Ngomo 2023, from the rules of the algebra: bases are sets of basis vectors."""
    bases = [(), *((i,) for i in range(p + q))]
    h, r, t = (np.reshape(row, (len(bases), -1)) for row in (head, relation, tail))
    product: dict[tuple[int, ...], np.ndarray | float] = defaultdict(float)
    for (a, left), (b, right) in itertools.product(enumerate(bases), repeat=2):
        both, sign = (*left, *right), 1.0
        if len(both) == 2 and both[0] == both[1]:
            both, sign = (), (1.0 if both[0] < p else -1.0)
        elif len(both) == 2 and both[0] > both[1]:
            both, sign = (both[1], both[0]), -1.0
        product[both] = product[both] + sign * h[a] * r[b]
    return sum((product[base] * t[a]).sum() for a, base in enumerate(bases))


def pairre(head: Row, relation: Row, tail: Row) -> float:
    """Chao et al. 2021."""
    of_head, of_tail = np.split(relation, 2)
    return -np.abs(unit(head) * of_head - unit(tail) * of_tail).sum()


def triplere(head: Row, relation: Row, tail: Row) -> float:
    """Yu et al. 2022: [scaling of heads, translation, scaling of tails]."""
    of_head, translation, of_tail = np.split(relation, 3)
    return -np.abs(unit(head) * of_head - unit(tail) * of_tail + translation).sum()


def unit(row: Row) -> Row:
    """Divide a row by its norm, but for 0."""
    return row / (np.linalg.norm(row) or 1)


def projected(head: Row, relation: Row, tail: Row) -> Row:
    """Lin et al. 2015: h M + r - t M of [r, the rows of M]."""
    dim = len(head)
    matrix = relation[dim:].reshape(dim, dim)
    return head @ matrix + relation[:dim] - tail @ matrix


def transr(head: Row, relation: Row, tail: Row) -> float:
    """Lin et al. 2015, without the square."""
    return -np.sqrt((projected(head, relation, tail) ** 2).sum())


def transr_l1(head: Row, relation: Row, tail: Row) -> float:
    """DGL-KE's, without gamma."""
    return -np.abs(projected(head, relation, tail)).sum()


def keci(head: Row, relation: Row, tail: Row) -> float:
    """Keci with its default options."""
    return clifford(head, relation, tail, 0, 1)


PLAIN = (transe_l1, transe_l2, distmult, complex_, rotate, rescal, simple, de_simple, quate, keci, pairre)
ORACLES: dict[str, Callable[[Row, Row, Row], float]] = {
    **{function.__name__.strip("_"): function for function in (*PLAIN, triplere, transr, transr_l1)},
    **DENSE,
}

NOT_ON_A_GRID = {"rotate", "quate", "de_simple", "pairre", "triplere", *DENSE}
"""Score functions that turn whole numbers into others."""


def fitting_dim(name: str, dim: int) -> int:
    """Return the least dimension from ``dim`` on that a score function has rows of."""
    function = SCORE_FUNCTIONS.get(name)()
    while function.other_dims(dim):
        dim += 1
    return dim


def float64_score(name: str, *rows: Sequence[float]) -> float:
    """Score one triple of rows: head, relation, tail."""
    return float(ORACLES[name](*(np.asarray(row, np.float64) for row in rows)))
