"""Penalties of queries as their papers write them, in complex numbers; torch differentiates them."""

from __future__ import annotations

import torch


def numbers(row: torch.Tensor, is_complex: bool) -> torch.Tensor:
    """Read a row (..., D) as numbers: first half real, second half imaginary, or all of them real."""
    if not is_complex:
        return row
    half = row.shape[-1] // 2
    return torch.complex(row[..., :half], row[..., half:])


def power_sum(values: torch.Tensor, power: float) -> torch.Tensor:
    """Return the sum of the moduli's powers, by squares so that the gradient at 0 is finite."""
    squares = values.real**2 + values.imag**2 if values.is_complex() else values**2
    return (squares ** (power / 2)).sum(-1)


def query_penalty(
    name: str,
    anchor: torch.Tensor,
    relation: torch.Tensor,
    answer: torch.Tensor,
    *,
    is_complex: bool,
    is_turned: bool = False,
    p: float = 3.0,
    entity_ratio: float = 1.0,
    relation_ratio: float = 1.0,
    product_ratio: float = 1.0,
) -> torch.Tensor:
    """Return the penalty of a query (a, r, ?) with answer t; ``is_turned``: the query is a conj(r)."""
    a, r, t = (numbers(row, is_complex) for row in (anchor, relation, answer))
    r = r.conj() if is_turned else r
    if name == "dura":
        return product_ratio * power_sum(a * r, 2) + entity_ratio * power_sum(t, 2)
    power = {"n3": 3.0, "f2": 2.0}.get(name, p)
    total = entity_ratio * (power_sum(a, power) + power_sum(t, power)) + relation_ratio * power_sum(r, power)
    if name == "ivr":
        total = total + product_ratio * (
            power_sum(a * r, power) + power_sum(r * t, power) + power_sum(t * a, power)
        )
    return total
