"""The registry: names to members, and errors that list what is known."""

from __future__ import annotations

import sys

import pytest

from dglkge.errors import InputError
from dglkge.registry import Registry, import_modules


@pytest.fixture
def shapes() -> Registry[type]:
    """A registry of two classes, filed out of order."""
    registry: Registry[type] = Registry("shape")

    @registry.register("square")
    class Square: ...

    @registry.register("circle")
    class Circle: ...

    return registry


def test_members_are_found_by_name_and_registered_once(shapes):
    assert shapes.get("circle").__name__ == "Circle" and shapes.get("square").__name__ == "Square"
    assert list(shapes) == ["circle", "square"] and len(shapes) == 2
    assert len(Registry("colour")) == 0 and list(Registry("colour")) == []
    with pytest.raises(InputError, match="^unknown shape 'sqare'; did you mean 'square'. known: 'circle', '"):
        shapes.get("sqare")
    with pytest.raises(ValueError, match=r"^the shape 'circle' is registered already$"):
        shapes.register("circle")(int)
    marker = object()
    assert shapes.register("marker")(marker) is shapes.get("marker") is marker


@pytest.mark.parametrize("is_searched", [True, False])
def test_an_import_leaves_the_search_path_as_it_was(tmp_path, monkeypatch, is_searched):
    """The current folder is searched last, and keeps its place where it is searched anyway."""
    name = f"own_module_{is_searched}".lower()
    (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    path = [str(tmp_path), *sys.path] if is_searched else [item for item in sys.path if item != str(tmp_path)]
    monkeypatch.setattr(sys, "path", list(path))
    import_modules([name])
    assert name in sys.modules
    assert sys.path == path
