"""The registry: names to members, and errors that list what is known."""

from __future__ import annotations

import pytest

from dglkge.errors import InputError
from dglkge.registry import Registry


@pytest.fixture
def shapes() -> Registry[type]:
    """A registry of two classes, filed out of order."""
    registry: Registry[type] = Registry("shape")

    @registry.register("square")
    class Square: ...

    @registry.register("circle")
    class Circle: ...

    return registry


def test_members_are_found_by_name(shapes):
    assert shapes.get("circle").__name__ == "Circle"
    assert shapes.get("square").__name__ == "Square"


def test_iterates_over_sorted_names(shapes):
    assert list(shapes) == ["circle", "square"]
    assert len(shapes) == 2


def test_register_returns_its_argument_unchanged(shapes):
    marker = object()
    assert shapes.register("marker")(marker) is marker
    assert shapes.get("marker") is marker


def test_unknown_name_lists_the_known(shapes):
    with pytest.raises(InputError) as caught:
        shapes.get("sqare")
    assert str(caught.value) == "unknown shape 'sqare'; did you mean 'square'? known: 'circle', 'square'"


def test_a_name_is_given_once(shapes):
    with pytest.raises(ValueError, match=r"^the shape 'circle' is registered already$"):
        shapes.register("circle")(int)
    assert shapes.get("circle") is not int


def test_registries_do_not_share_members(shapes):
    assert len(Registry("colour")) == 0 and list(Registry("colour")) == []
