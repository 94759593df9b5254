"""Options of components: the parameters of their constructors, checked."""

from __future__ import annotations

import inspect
import math
from typing import Any, TypeVar

from dglkge.errors import InputError
from dglkge.registry import Registry

T = TypeVar("T")


def build_with_options(registry: Registry[type[T]], name: str, options: dict[str, float]) -> T:
    """Build a member of a registry, its options checked against its constructor.

    Raises
    ------
    InputError
        If the name is not registered, or the member has no such option; the message lists the known ones.
    """
    member = registry.get(name)
    known = option_names(member)
    for option in options:
        if option not in known:
            allowed = ", ".join(repr(one) for one in known) if known else "none"
            raise InputError(f"the {registry.noun} {name!r} has no option {option!r}; its options: {allowed}")
    return member(**options)


def option_names(member: type) -> list[str]:
    """Return the names of the parameters of a class's constructor."""
    # A class without a constructor of its own has no options; object's signature says nothing about them.
    has_none = "__init__" not in {name for base in member.__mro__[:-1] for name in vars(base)}
    return [] if has_none else list(inspect.signature(member).parameters)


def configured_options(member: type, section: Any) -> dict[str, Any]:
    """Return the options of a class that a section of the configuration has fields for, with their values."""
    return {name: getattr(section, name) for name in option_names(member) if hasattr(section, name)}


def checked_number(what: str, value: float, minimum: float, exclusive: bool = False) -> float:
    """Return the value if it is a finite number that is large enough.

    Raises
    ------
    InputError
        If it is not.
    """
    # bool is an int for Python, and `true` in a file is no number. NaN and infinity would spread into all
    # rows.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < minimum or (exclusive and value == minimum):
        limit = f"greater than {minimum:g}" if exclusive else f"at least {minimum:g}"
        raise InputError(f"{what} must be a number {limit}, got {value!r}")
    return float(value)
