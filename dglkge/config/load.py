"""A configuration from a YAML file and ``key=value`` overrides, checked; and back to JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import yaml

from dglkge.config.schema import RENAMED, Config
from dglkge.errors import InputError, unknown_name

# Decimal digits only. YAML 1.1 reads 0123 as octal 83 and 12:30 as base 60; a person means neither.
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9][0-9_]*")
_HEXADECIMAL = re.compile(r"[+-]?0x[0-9a-fA-F]+")
_QUOTES = ("'", '"')


@dataclass(frozen=True)
class _Given:
    """A value of a file or an override.

    Attributes
    ----------
    value : object
        As YAML 1.1 reads it, which takes 0123 for 83, 12:30 for 750, and an empty text for null.
    text : str or None
        As it was written, without quotes; None for what is no single value.
    where : str
        Where it was written.
    is_yaml : bool
        Whether it is valid YAML; as an override, a text need not be.
    """

    value: Any
    text: str | None
    where: str
    is_yaml: bool = True

    @classmethod
    def of_node(cls, node: yaml.Node, where: str) -> _Given:
        """Take a value from a file."""
        value = _constructed(node)
        if not isinstance(node, yaml.ScalarNode):
            return cls(value, None, where)
        # null and an empty value become an empty text, which only text fields accept.
        return cls(value, node.value if value is not None else "", where)

    @classmethod
    def of_override(cls, text: str, where: str) -> _Given:
        """Take the value of an override; only quotes around the whole of it mean something."""
        text = text.strip()
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            value = None if node is None else _constructed(node)
        except yaml.YAMLError:
            # Kept as text: the value of a text field need not be YAML, e.g. `[x`.
            return cls(text, text, where, is_yaml=False)
        if isinstance(node, yaml.ScalarNode) and text[:1] in _QUOTES:
            return cls(value, node.value, where)
        is_null = isinstance(node, yaml.ScalarNode) and value is None
        return cls(value, "" if is_null else text, where)


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
        For a file that cannot be read, an unknown key (the message names the nearest known one), a repeated
        or renamed key, a value of the wrong type or out of range; with file and line for a value of the
        file. A .json file, as runs save it, may have former names of fields.
    """
    # Flat keys until the end: file and overrides are merged key by key before any type is checked.
    values: dict[str, _Given] = {}
    if path is not None:
        found = _flatten(_compose(Path(path)), str(path))
        if Path(path).suffix == ".json":
            # A run saved it, maybe of an older version; in a file that a person wrote an old name is refused.
            found = {RENAMED.get(key, key): given for key, given in found.items()}
        values.update(found)
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise InputError(f"override {text!r} is not of the form key=value, e.g. model.dimension=200")
        values[key.strip()] = _Given.of_override(value, f"override {text!r}")
    config: Config = _build(Config, "", values)
    # dict.fromkeys removes repetitions and keeps the order, which is the order of registration.
    added = [one for one in dict.fromkeys(imports) if one not in config.imports]
    return dataclasses.replace(config, imports=(*config.imports, *added))


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write a configuration as JSON, atomically; :func:`load_config` reads it back."""
    target = Path(path)
    # Written aside and renamed, which POSIX does atomically: a reader finds the old file or the new one.
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, target)


def _compose(path: Path) -> yaml.Node | None:
    """Parse a YAML file into nodes, which have line numbers."""
    try:
        # compose() instead of load(): nodes keep line numbers and the text as it was written.
        return yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the configuration {path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise InputError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None


def _flatten(node: yaml.Node | None, path: str, prefix: str = "") -> dict[str, _Given]:
    """Turn nested mappings into {dotted key: value}."""
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"{path}:{node.start_mark.line + 1}: expected 'key: value' lines")
    flat: dict[str, _Given] = {}
    first_line: dict[str, int] = {}
    for key, value in node.value:
        where = f"{path}:{key.start_mark.line + 1}"
        name = f"{prefix}{key.value}"
        # YAML's own loader takes the last of two equal keys without a word.
        if name in first_line:
            raise InputError(
                f"{where}: the key {name} stands in line {first_line[name]} already; allowed is once"
            )
        first_line[name] = key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            found = _flatten(value, path, name + ".")
        else:
            found = {name: _Given.of_node(value, where)}
        # model.dimension may also stand as dimension below model.
        for full, given in found.items():
            if full in flat:
                raise InputError(
                    f"{given.where}: the key {full} is given at {flat[full].where} already; allowed is once"
                )
        flat.update(found)
    return flat


def _known_keys(of: Any, prefix: str) -> list[str]:
    keys = []
    for name, kind in get_type_hints(of).items():
        keys += _known_keys(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else [prefix + name]
    return keys


def _build(of: Any, prefix: str, values: Mapping[str, _Given]) -> Any:
    """Make one dataclass of the schema from flat values, checking each."""
    known = _known_keys(Config, "")
    # Once, on the outermost call, which has the keys of all sections.
    if not prefix:
        for key, given in values.items():
            if key in RENAMED:
                raise InputError(f"{given.where}: {key} is now called {RENAMED[key]}")
            if key not in known:
                raise InputError(f"{given.where}: {unknown_name('key', key, known)}")
    hints = get_type_hints(of)
    arguments = {}
    for item in dataclasses.fields(of):
        key, kind = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(kind):
            arguments[item.name] = _build(kind, key + ".", values)
            continue
        value, where = item.default, ""
        if key in values:
            value, where = _convert(values[key], kind, key), values[key].where
        check = item.metadata["check"]
        allowed = check(value) if check else None
        if allowed and key not in values:
            raise InputError(f"{key} is not given; expected {allowed}")
        if allowed:
            raise InputError(f"{where}: {key} is {value!r}; allowed: {allowed}")
        arguments[item.name] = value
    return of(**arguments)


def _convert(given: _Given, kind: type, key: str) -> Any:
    """Return the value as its field's type, or raise an error that names the type.

    The field decides how a text is read, not YAML: a text stays as it was written, and a whole number is
    decimal (or hexadecimal after 0x).
    """
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    text, value = given.text, given.value
    if get_origin(kind) is tuple:
        texts = value if isinstance(value, list) else [text] if text else []
        if not given.is_yaml or not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
            raise InputError(f"{given.where}: {key} is {value!r}; allowed: a text or a list of texts")
        return tuple(texts)
    if kind is str and text is not None:
        return text
    if not given.is_yaml:
        raise InputError(f"{given.where}: the value is not valid YAML")
    if text is not None and not isinstance(value, bool):
        if kind is int:
            if _WHOLE_NUMBER.fullmatch(text):
                return int(text.replace("_", ""))
            if _HEXADECIMAL.fullmatch(text):
                return int(text, 16)
        if kind is float:
            number = _number(text)
            if number is not None and not math.isfinite(number):
                raise InputError(f"{given.where}: {key} is {number!r}; allowed: a finite number")
            if number is not None:
                return number
        # The error names what was written: YAML's reading of it (83 for 0123) would puzzle the user.
        if value is None or kind is not bool and not isinstance(value, float):
            value = text
    # Exact type: bool is a subclass of int, and `true` must not pass as 1.
    if type(value) is not kind:
        raise InputError(f"{given.where}: {key} is {value!r}; allowed: {words[kind]}")
    return value


def _constructed(node: yaml.Node) -> Any:
    """Return YAML's value of a node, or its text if YAML fails, e.g. for the date 2024-13-45."""
    try:
        return yaml.constructor.SafeConstructor().construct_document(node)
    except ValueError:
        return getattr(node, "value", None)


def _number(text: str) -> float | None:
    """Return a number; None for another text. YAML 1.1 reads 1e-3, which has no dot, as a text."""
    try:
        # YAML spells infinity .inf and NaN .nan; the caller refuses both with a message of its own.
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        return None
