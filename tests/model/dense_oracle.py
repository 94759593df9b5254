"""The score functions with modules, one Python number at a time, with the parameters of seed 0."""

from __future__ import annotations

import functools
import math
from typing import Any

from dglkge.model.kge_model import build_model

Row = list[float]


@functools.cache
def parameters(name: str, dim: int) -> dict[str, Any]:
    """Return the parameters of a score function by name, as nested lists."""
    module = build_model(name, dim, reciprocal=True).module
    assert module is not None
    return {name: values.tolist() for name, values in module.named_parameters()}


def tucker(head: Row, relation: Row, tail: Row) -> float:
    """Balazevic et al. 2019, eq. 3."""
    core = parameters("tucker", len(head))["core"]
    total = 0.0
    for i, r in enumerate(relation):
        for j, h in enumerate(head):
            for k, t in enumerate(tail):
                total += core[i][j][k] * r * h * t
    return total


def normalized(row: Row, gain: Row, offset: Row) -> Row:
    """Ba et al. 2016: over a row, with the term of torch in the root."""
    mean = sum(row) / len(row)
    variance = sum((x - mean) ** 2 for x in row) / len(row)
    return [(x - mean) / math.sqrt(variance + 1e-5) * g + b for x, g, b in zip(row, gain, offset)]


def linear(row: Row, weight: list[Row], bias: Row) -> Row:
    """Multiply by a matrix (out, in) and add."""
    return [sum(w * x for w, x in zip(line, row)) + b for line, b in zip(weight, bias)]


def convolved(tensors: dict[str, Any], image: list[Row], padding: int) -> Row:
    """All filters over an image, normalized together, a gain and an offset for each filter, cut at 0."""
    width = len(image[0])
    empty = [0.0] * (width + 2 * padding)
    lines = [[0.0] * padding + line + [0.0] * padding for line in image]
    lines = [empty] * padding + lines + [empty] * padding
    outputs, gains, offsets = [], [], []
    for number, (kernel,) in enumerate(tensors["convolution.weight"]):
        for top in range(len(lines) - len(kernel) + 1):
            for left in range(len(lines[0]) - len(kernel[0]) + 1):
                total = 0.0
                for y, weights in enumerate(kernel):
                    for x, weight in enumerate(weights):
                        total += weight * lines[top + y][left + x]
                outputs.append(total)
                gains.append(tensors["convolution.gain"][number][0][0])
                offsets.append(tensors["convolution.offset"][number][0][0])
    return [max(0.0, x) for x in normalized(outputs, gains, offsets)]


def features(tensors: dict[str, Any], rows: Row, height: int, padding: int) -> Row:
    """The layers that ConvE and ConEx have alike."""
    rows = normalized(rows, tensors["normalized.weight"], tensors["normalized.bias"])
    width = len(rows) // height
    image = [rows[start : start + width] for start in range(0, len(rows), width)]
    outputs = linear(convolved(tensors, image, padding), tensors["linear.weight"], tensors["linear.bias"])
    return [max(0.0, x) for x in normalized(outputs, tensors["output.weight"], tensors["output.bias"])]


def conve(head: Row, relation: Row, tail: Row) -> float:
    """Dettmers et al. 2018, eq. 1, with the bias of the tail in its first number."""
    tensors, size = parameters("conve", len(head)), len(relation)
    height = max(n for n in range(1, size + 1) if size % n == 0 and n * n <= size)
    query = features(tensors, [*head[1:], *relation], 2 * height, padding=0)
    return tail[0] + sum(q * t for q, t in zip(query, tail[1:]))


def conex(head: Row, relation: Row, tail: Row) -> float:
    """Demir and Ngonga Ngomo 2021, eq. 5."""
    tensors, half = parameters("conex", len(head)), len(head) // 2
    factors = features(tensors, [*head, *relation], 4, padding=1)
    c, h, r, t = map(numbers, (factors, head, relation, tail))
    return sum((c[k] * h[k] * r[k] * t[k].conjugate()).real for k in range(half))


def transformer(head: Row, relation: Row, tail: Row) -> float:
    """Vaswani et al. 2017 over (query, head, relation), 4 heads, 1 layer; GELU by the error function."""
    tensors, dim, num_heads = parameters("transformer", len(head)), len(head), 4
    tokens = [
        normalized(
            [x + p for x, p in zip(row, positions)], tensors["normalized.weight"], tensors["normalized.bias"]
        )
        for row, positions in zip(([0.0] * dim, head, relation), tensors["positions"])
    ]

    def of(name: str) -> tuple[Any, Any]:
        return tensors[f"layers.0.{name}.weight"], tensors[f"layers.0.{name}.bias"]

    both = [linear(token, tensors["layers.0.attended"], [0.0] * 3 * dim) for token in tokens]
    size = dim // num_heads
    mixed: Row = []
    for number in range(num_heads):
        part = slice(number * size, (number + 1) * size)
        query_part = both[0][:dim][part]
        products = [
            sum(a * b for a, b in zip(query_part, row[dim : 2 * dim][part])) / math.sqrt(size) for row in both
        ]
        powers = [math.exp(x) for x in products]
        for place in range(size):
            values = [row[2 * dim :][part][place] for row in both]
            mixed.append(sum(p * v for p, v in zip(powers, values)) / sum(powers))
    query = [x + y for x, y in zip(tokens[0], linear(mixed, *of("mixed")))]
    query = normalized(query, *of("first_norm"))
    inner = [x / 2 * (1 + math.erf(x / math.sqrt(2))) for x in linear(query, *of("inner"))]
    query = [x + y for x, y in zip(query, linear(inner, *of("outer")))]
    return sum(q * t for q, t in zip(normalized(query, *of("second_norm")), tail))


def tcomplex(head: Row, relation: Row, tail: Row) -> float:
    """Lacroix et al. 2020, eq. 3; the last number of the relation is that of the time."""
    moment = numbers(parameters("tcomplex", len(head))["rows"][int(relation[-1])])
    factors = zip(numbers(head), numbers(relation[:-1]), moment, numbers(tail))
    return sum((h * r * u * t.conjugate()).real for h, r, u, t in factors)


def tntcomplex(head: Row, relation: Row, tail: Row) -> float:
    """Lacroix et al. 2020, eq. 4."""
    dim = len(head)
    moment = numbers(parameters("tntcomplex", dim)["rows"][int(relation[-1])])
    changing, constant = numbers(relation[:dim]), numbers(relation[dim : 2 * dim])
    factors = zip(numbers(head), changing, moment, constant, numbers(tail))
    return sum((h * (r * u + always) * t.conjugate()).real for h, r, u, always, t in factors)


def numbers(row: Row) -> list[complex]:
    """Read a row as complex numbers: first half real, second half imaginary."""
    half = len(row) // 2
    return [complex(real, imaginary) for real, imaginary in zip(row[:half], row[half:])]


DENSE = {
    "tucker": tucker,
    "conve": conve,
    "conex": conex,
    "transformer": transformer,
    "tcomplex": tcomplex,
    "tntcomplex": tntcomplex,
}
FORWARD_ONLY = {"conve", "conex", "transformer"}
"""Those that predict heads by relation rows of their own only."""
