"""Checks of what a user may set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

#: Types in which gradient rows may travel.
WIRE_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)


def check_options(
    duplicates: str, wire_dtype: torch.dtype | None, nonfinite: str, timeout_seconds: float
) -> None:
    """Refuse options of an optimizer that mean nothing.

    Raises
    ------
    ValueError
        With the name of the option, what was got and what is allowed.
    """
    if duplicates not in ("sum", "mean"):
        raise ValueError(f"duplicates must be 'sum' or 'mean', got {duplicates!r}")
    if wire_dtype not in WIRE_DTYPES:
        raise ValueError(f"wire_dtype must be torch.float32, bfloat16 or float16, got {wire_dtype}")
    if nonfinite not in ("raise", "skip"):
        raise ValueError(f"nonfinite must be 'raise' or 'skip', got {nonfinite!r}")
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds}")


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse hyper-parameters of a parameter group that no rule can work with.

    Raises
    ------
    ValueError
        With the name of the hyper-parameter, what was got and what is allowed.
    """
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= float(group[name]) < math.inf:
            raise ValueError(f"{name} must be a finite number >= 0, got {group[name]}")
    if group["max_row_norm"] is not None and not group["max_row_norm"] > 0:
        raise ValueError(f"max_row_norm must be positive or None, got {group['max_row_norm']}")
    betas = group.get("betas", (0.0, 0.0))
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
