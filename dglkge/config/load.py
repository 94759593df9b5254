"""A configuration from a YAML file and ``key=value`` overrides, checked; and back to JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from dglkge.config.schema import Config
from dglkge.errors import InputError, unknown_name


def load_config(path: str | os.PathLike[str] | None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML (or JSON) file, apply overrides and check every field.

    Parameters
    ----------
    path : path or None
        None takes the defaults.
    overrides : sequence of str
        ``"model.dimension=200"`` and the like; each wins over the file and over those before it.

    Returns
    -------
    Config

    Raises
    ------
    InputError
        For a file that cannot be read, an unknown key (the nearest known one is named), a value of
        the wrong type or out of range; with file and line where the value stands in the file.
    """
    values: dict[str, tuple[Any, str]] = {}
    if path is not None:
        values.update(_flatten(_compose(Path(path)), str(path)))
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise InputError(f"override {text!r} is not of the form key=value, e.g. model.dimension=200")
        values[key.strip()] = (_plain(value, f"override {text!r}"), f"override {text!r}")
    return _build(Config, "", values)


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write a configuration as JSON, atomically; :func:`load_config` reads it back."""
    target = Path(path)
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, target)


def _compose(path: Path) -> yaml.Node | None:
    """Parse a YAML file into nodes, which know their lines."""
    try:
        return yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the configuration {path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise InputError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None


def _plain(text: str, where: str) -> Any:
    """Read the value of an override as YAML reads it."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"{where}: the value is not valid YAML") from None


def _flatten(node: yaml.Node | None, path: str, prefix: str = "") -> dict[str, tuple[Any, str]]:
    """Turn nested mappings into {dotted key: (value, "file:line")}."""
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"{path}:{node.start_mark.line + 1}: expected 'key: value' lines")
    flat: dict[str, tuple[Any, str]] = {}
    for key, value in node.value:
        where = f"{path}:{key.start_mark.line + 1}"
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode):
            flat.update(_flatten(value, path, name + "."))
        else:
            flat[name] = (yaml.safe_load(yaml.serialize(value)), where)
    return flat


def _known_keys(of: Any, prefix: str) -> list[str]:
    keys = []
    for name, kind in get_type_hints(of).items():
        keys += _known_keys(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else [prefix + name]
    return keys


def _build(of: Any, prefix: str, values: Mapping[str, tuple[Any, str]]) -> Any:
    """Make one dataclass of the schema from flat values, checking each."""
    known = _known_keys(Config, "")
    if not prefix:
        for key, (_, where) in values.items():
            if key not in known:
                raise InputError(f"{where}: {unknown_name('key', key, known)}")
    hints = get_type_hints(of)
    arguments = {}
    for item in dataclasses.fields(of):
        key, kind = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(kind):
            arguments[item.name] = _build(kind, key + ".", values)
            continue
        value, where = values.get(key, (item.default, "default"))
        value = _convert(value, kind, key, where)
        check = item.metadata["check"]
        allowed = check(value) if check else None
        if allowed:
            raise InputError(f"{where}: {key} is {value!r}; allowed: {allowed}")
        arguments[item.name] = value
    return of(**arguments)


def _convert(value: Any, kind: type, key: str, where: str) -> Any:
    """Return the value as its field's type, or say what the type is."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if kind is float and isinstance(value, str):
        # YAML 1.1 reads 1e-3 (no dot) as a text.
        try:
            return float(value)
        except ValueError:
            pass
    if kind is float and type(value) is int:
        return float(value)
    if kind is str and type(value) in (int, float):
        return str(value)
    if kind is str and value is None:
        return "none"
    if type(value) is not kind:
        raise InputError(f"{where}: {key} is {value!r}; allowed: {words[kind]}")
    return value
