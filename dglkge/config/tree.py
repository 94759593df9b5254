"""The tree of a configuration: a YAML file and overrides, merged key by key, with the place of each value."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dglkge.config.component import TAG
from dglkge.errors import InputError
from dglkge.settings import Items, Scalar, Tree

_QUOTES = ("'", '"')


def read_tree(path: str | os.PathLike[str] | None, overrides: Sequence[str]) -> Tree:
    """Read a YAML (or JSON) file and apply overrides.

    Parameters
    ----------
    path : path or None
    overrides : sequence of str
        ``"model.dimension=200"`` and the like; each wins over the file and over those before it.

    Raises
    ------
    InputError
        For a file that is missing or no YAML, a key that stands twice, or an override of another form.
    """
    tree = Tree() if path is None else _read_file(Path(path))
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise InputError(f"override {text!r} is not of the form key=value, e.g. model.dimension=200")
        _override(tree, key.strip().split("."), _of_override(value.strip(), f"override {text!r}"))
    return tree


def _read_file(path: Path) -> Tree:
    """Read a file; keys of its outermost level may be dotted."""
    try:
        # compose() instead of load(): nodes keep line numbers and the text as it was written.
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the configuration {path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise InputError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if node is None:
        return Tree(str(path))
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"{path}:{node.start_mark.line + 1}: expected 'key: value' lines")
    tree = Tree(str(path))
    for key, value in _of_node(node, str(path), str(path)).items():
        _merge(tree, key.split("."), value, "")
    return tree


def _of_node(node: yaml.Node, where: str, path: str = "", prefix: str = "", text: str | None = None) -> Any:
    """Return a node; with the path of its file, what is inside it has lines of its own."""
    if isinstance(node, yaml.ScalarNode):
        value = _constructed(node)
        return Scalar(value, "" if value is None else node.value, where)
    if isinstance(node, yaml.SequenceNode):
        items = Items(where, text)
        items.extend(_of_node(item, where, path) for item in node.value)
        return items
    tree = Tree(where, text)
    # SafeLoader makes no other nodes than these three.
    for key, value in node.value:
        name = str(key.value)
        place = f"{path}:{key.start_mark.line + 1}" if path else where
        # YAML's own loader takes the last of two equal keys without a word.
        if name in tree:
            first = tree[name].where.rpartition(":")[2]
            raise InputError(
                f"{place}: the key {prefix}{name} stands in line {first} already; allowed is once"
            )
        tree[name] = _of_node(value, place, path, f"{prefix}{name}.")
    return tree


def _of_override(text: str, where: str) -> Any:
    """Return the value of an override; only quotes around the whole of it mean something."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return Scalar(None, text, where)
        if not isinstance(node, yaml.ScalarNode):
            return _of_node(node, where, text=text)
        value = _constructed(node)
    except yaml.YAMLError:
        # Kept as text: the value of a text field need not be YAML, e.g. `[x`.
        return Scalar(text, text, where)
    return Scalar(value, node.value if text[:1] in _QUOTES else "" if value is None else text, where)


def _merge(tree: Tree, keys: Sequence[str], value: Any, prefix: str) -> None:
    """Put a value of a file below a dotted key: model.dimension may also stand as dimension below model."""
    name, key = keys[0], f"{prefix}{keys[0]}"
    if len(keys) > 1:
        below = Tree(value.where)
        _merge(below, keys[1:], value, f"{key}.")
        value = below
    there = tree.get(name)
    if isinstance(there, Tree) and isinstance(value, Tree):
        for inner, one in value.items():
            _merge(there, [inner], one, f"{key}.")
    elif there is not None:
        raise InputError(f"{value.where}: the key {key} is given at {there.where} already; allowed is once")
    else:
        tree[name] = value


def _override(tree: Tree, keys: Sequence[str], value: Any) -> None:
    """Put the value of an override in place of what is there."""
    for name in keys[:-1]:
        there = tree.get(name)
        if not isinstance(there, Tree):
            below = Tree(value.where)
            if isinstance(there, Scalar) and there.value is not None:
                below[TAG] = there
            tree[name] = below
        tree = tree[name]
    tree[keys[-1]] = value


def _constructed(node: yaml.Node) -> Any:
    """Return YAML's value of a node, or its text if YAML fails, e.g. for the date 2024-13-45."""
    try:
        return yaml.constructor.SafeConstructor().construct_document(node)
    except ValueError:
        return getattr(node, "value", None)
