"""A configuration from a YAML file and ``key=value`` overrides, checked; and back to JSON."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dglkge.config.schema import DATASET, Config, fields
from dglkge.config.tree import read_tree
from dglkge.errors import InputErrors, unknown_name
from dglkge.settings import Items, Scalar, Tree

FORMER = {"training.products": "training.matmul_dtype"}
"""Former names of fields: the error of a file that has one names the present one."""

ALLOWED = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "a number above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
    "finite_number": "a finite number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "a text",
}
"""What pydantic's types of errors allow, with the numbers of their context."""


def load_config(
    path: str | os.PathLike[str] | None, overrides: Sequence[str] = (), imports: Sequence[str] = ()
) -> Config:
    """Read a YAML (or JSON) file, apply overrides and check every field.

    Parameters
    ----------
    path : path or None
        None takes the defaults.
    overrides : sequence of str
        ``"model.dimension=200"`` and the like; each wins over the file and over those before it.
    imports : sequence of str
        Added to the field ``imports``: modules or .py files that register components. Nothing is imported
        here.

    Returns
    -------
    Config

    Raises
    ------
    InputError
        For a file that cannot be read, and for all unknown keys (with the nearest known one), former names,
        and values of the wrong type or out of range at once; with file and line for those of the file.
    """
    tree = read_tree(path, overrides)
    problems = []
    config = Config()
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems = _problems(error, tree)
    if "dataset" not in tree:
        problems.append(f"dataset is not given; expected {DATASET}")
    if problems:
        raise InputErrors(problems)
    # dict.fromkeys removes repetitions and keeps the order, which is the order of registration.
    return config.changed(imports=tuple(dict.fromkeys([*config.imports, *imports])))


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write a configuration as JSON, atomically; :func:`load_config` reads it back."""
    target = Path(path)
    # Written aside and renamed, which POSIX does atomically: a reader finds the old file or the new one.
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, target)


def _problems(error: ValidationError, tree: Tree) -> list[str]:
    """Return a line for each mistake, with its place in the file."""
    known = [key for key, _ in fields()]
    lines = []
    for problem in error.errors(include_url=False):
        key = ".".join(map(str, problem["loc"]))
        value, where = problem["input"], _place(tree, problem["loc"])
        if problem["type"] in ("extra_forbidden", "model_type"):
            # A mapping under an unknown name: the keys in it may be near to known ones.
            lines += [f"{where_}: {_unknown_key(full, known)}" for full, where_ in _leaves(key, value, where)]
        else:
            lines.append(f"{where}: {key} is {_shown(value)!r}; {_expected(problem, value)}")
    return lines


def _expected(problem: Mapping[str, Any], value: Any) -> str:
    """Return what is allowed in place of a value, and the nearest name."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "value_error":
        return f"allowed: {context['error']}"
    if kind != "literal_error":
        return f"allowed: {ALLOWED[kind].format(**context) if kind in ALLOWED else problem['msg']}"
    names = re.findall(r"'([^']*)'", context["expected"]) or context["expected"].split(" or ")
    near = difflib.get_close_matches(str(value), names, n=1)
    return f"allowed: one of {', '.join(names)}" + (f"; did you mean {near[0]!r}?" if near else "")


def _unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the message about a key that is no field's."""
    if key in FORMER:
        return f"{key} is now called {FORMER[key]}"
    return str(unknown_name("key", key, known))


def _leaves(key: str, value: Any, where: str) -> list[tuple[str, str]]:
    """Return (dotted key, place) of each value in a mapping, or of the value itself."""
    if not isinstance(value, Tree) or not value:
        return [(key, where)]
    return [leaf for name, one in value.items() for leaf in _leaves(f"{key}.{name}", one, one.where)]


def _place(tree: Any, keys: Sequence[str | int]) -> str:
    """Return where a value was written: its own place, or that of the mapping in which it is missing."""
    where = ""
    for key in keys:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            break
        where = tree.where
    return where


def _shown(value: Any) -> Any:
    """Return a value as messages have it."""
    return value.shown() if isinstance(value, (Scalar, Items, Tree)) else value
