"""Building a registered class from options that a user wrote."""

from __future__ import annotations

import inspect
import math
from typing import TypeVar

from dglkge.errors import InputError
from dglkge.registry import Registry

T = TypeVar("T")


def build_with_options(registry: Registry[type[T]], name: str, options: dict[str, float]) -> T:
    """Build a member of a registry, its options checked against its constructor.

    Raises
    ------
    InputError
        If nobody knows the name, or the member knows no such option; the message names what is known.
    """
    member = registry.get(name)
    known = [] if member.__init__ is object.__init__ else list(inspect.signature(member).parameters)
    for option in options:
        if option not in known:
            allowed = ", ".join(repr(one) for one in known) if known else "none"
            raise InputError(f"the {registry.noun} {name!r} has no option {option!r}; its options: {allowed}")
    return member(**options)


def checked_number(what: str, value: float, minimum: float, exclusive: bool = False) -> float:
    """Return the value if it is a finite number that is large enough.

    Raises
    ------
    InputError
        If it is not.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < minimum or (exclusive and value == minimum):
        limit = f"greater than {minimum:g}" if exclusive else f"at least {minimum:g}"
        raise InputError(f"{what} must be a number {limit}, got {value!r}")
    return float(value)
