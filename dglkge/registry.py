"""A registry of named classes whose error lists what is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Callable, Generic, TypeVar

from dglkge.errors import unknown_name

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to objects of one kind.

    Parameters
    ----------
    noun : str
        What the registered things are, for error messages, e.g. ``"score function"``.

    Examples
    --------
    >>> shapes: Registry[type] = Registry("shape")
    >>> @shapes.register("circle")
    ... class Circle: ...
    >>> shapes.get("circle") is Circle
    True
    """

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._members: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that files its argument under a name.

        Raises
        ------
        ValueError
            If the name is taken; two members under one name are a mistake in the code, not in the input.
        """

        def file(member: T) -> T:
            if name in self._members:
                raise ValueError(f"the {self.noun} {name!r} is registered already")
            self._members[name] = member
            return member

        return file

    def get(self, name: str) -> T:
        """Return the member of that name.

        Raises
        ------
        InputError
            If nobody registered the name; the message lists the known ones.
        """
        if name not in self._members:
            raise unknown_name(self.noun, name, self._members)
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._members))

    def __len__(self) -> int:
        return len(self._members)
