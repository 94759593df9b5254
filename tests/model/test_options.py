"""Members built from a user's options; numbers checked."""

from __future__ import annotations

import math

import pytest

from dglkge.errors import InputError
from dglkge.model.options import build_with_options, checked_number, named_weights
from dglkge.registry import Registry

SHAPES: Registry[type] = Registry("shape")


@SHAPES.register("circle")
class Circle:
    """Has one option."""

    def __init__(self, radius: float = 1.0) -> None:
        self.radius = radius


@SHAPES.register("point")
class Point:
    """Has none."""


def test_weights_by_name():
    assert named_weights("x", []) == {}
    assert named_weights("x", ["a=2", "b=c=.5", "d=0"]) == {"a": 2.0, "b=c": 0.5, "d": 0.0}


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=-1", "a=nan", "a=inf", "a=b"])
def test_texts_that_are_no_weights(text):
    with pytest.raises(InputError, match="x has '.*'; allowed: name=weight, the weight a number at least 0"):
        named_weights("x", [text])


def test_options_reach_the_member():
    assert build_with_options(SHAPES, "circle", {}).radius == 1.0
    assert build_with_options(SHAPES, "circle", {"radius": 3}).radius == 3
    assert isinstance(build_with_options(SHAPES, "point", {}), Point)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("circle", {"width": 1}, "the shape 'circle' has no option 'width'; its options: 'radius'"),
        ("point", {"radius": 1}, "the shape 'point' has no option 'radius'; its options: none"),
        ("square", {}, "unknown shape 'square'; known: 'circle', 'point'"),
    ],
)
def test_unknown_names(name, options, message):
    with pytest.raises(InputError) as error:
        build_with_options(SHAPES, name, options)
    assert str(error.value) == message


@pytest.mark.parametrize("value", [0, 0.0, 2, 3.5])
def test_numbers_become_floats(value):
    assert checked_number("it", value, 0) == value
    assert type(checked_number("it", value, 0)) is float


@pytest.mark.parametrize("value", [-1e-9, math.inf, math.nan, None, "2", True])
def test_what_is_no_number_in_range(value):
    with pytest.raises(InputError, match="it must be a number at least 0, got"):
        checked_number("it", value, 0)


def test_exclusive_minimum():
    with pytest.raises(InputError, match="it must be a number greater than 0, got 0"):
        checked_number("it", 0, 0, exclusive=True)
