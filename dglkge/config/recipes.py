"""The recipes that ship: configurations by name, ``fb15k237/complex`` for example.

They are ``examples/<data set>/<name>.yaml`` of the repository; setup.py copies them into a wheel.
"""

from __future__ import annotations

from pathlib import Path

from dglkge.errors import unknown_name

PACKAGED = Path(__file__).resolve().parent / "recipes"
REPOSITORY = Path(__file__).resolve().parents[2] / "examples"
SCHEMA = Path(__file__).resolve().with_name("schema.json")
"""JSON Schema of a configuration, which recipes name for editors: ``dglkge config --schema`` prints it."""
NAMED_SCHEMA = "../../dglkge/config/schema.json"
"""Its path in the first line of a recipe."""
SPACE_KEY = "\nspace:"
"""Begins a line of the files that are search spaces instead."""


def recipe_files() -> dict[str, Path]:
    """Return the files of all recipes by name, sorted."""
    folder = PACKAGED if PACKAGED.is_dir() else REPOSITORY
    found = {f"{path.parent.name}/{path.stem}": path for path in sorted(folder.glob("*/*.yaml"))}
    return {name: path for name, path in found.items() if SPACE_KEY not in path.read_text(encoding="utf-8")}


def recipe_file(name: str) -> Path:
    """Return the file of a recipe.

    Raises
    ------
    InputError
        If there is none of that name; the message has the nearest ones.
    """
    found = recipe_files()
    if name not in found:
        raise unknown_name("recipe", name, found)
    return found[name]
