"""Regularizers by name, for tests."""

from __future__ import annotations

from dglkge.model.regularizers import REGULARIZERS, Regularizer
from dglkge.settings import settings_of


def build_regularizer(
    name: str, weight: float, p: float = 3.0, complex_valued: bool = False, **ratios: float
) -> Regularizer:
    member = REGULARIZERS.get(name)
    values = {"name": name, "weight": weight, "p": p}
    known = {key: value for key, value in values.items() if key in member.Settings.model_fields}
    return member(settings_of("regularizer", member.Settings, {**known, **ratios}), complex_valued)
