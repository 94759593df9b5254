"""Arguments of :func:`dglkge.train`: what is taken, in which forms, and what is refused by their names."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dglkge.config.load import recipe_files
from dglkge.data.text_format import parse_columns
from dglkge.errors import InputError, require_known, unknown_name
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.partition.options import AUTO_SPLIT, Options, ReadingOptions, parse_fractions


@dataclass(frozen=True)
class DataOptions:
    """How the data set of :func:`dglkge.train` is made; nothing of it goes with a data set that is there.

    Attributes
    ----------
    valid, test : object, optional
        Further splits of a data frame, or of another object with triples.
    columns : str
        Columns of head, relation and tail, as in ``partition.py --columns``.
    split : float, three floats or str, optional
        Share of train, or shares of train, valid and test, of a single set of triples; by default .9, .05
        and .05.
    seed : int
        Of the split; ``settings={"seed": 1}`` is that of the training.
    reading : mapping
        How a file or folder is read: the fields of
        :class:`dglkge.partition.options.ReadingOptions`, for example
        ``{"types_from": "rdf:type", "literals": "numeric"}``.
    """

    valid: Any = None
    test: Any = None
    columns: str = "head,relation,tail"
    split: Any = None
    seed: int = 0
    reading: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> DataOptions:
        """Build the options from keyword arguments.

        Raises
        ------
        InputError
            If there is no such argument.
        """
        known = [*(option.name for option in fields(cls)), *_ARGUMENTS]
        for name in values:
            require_known("argument of dglkge.train", name, known)
        return cls(**values)

    def to_options(self, name: str, progress: bool) -> Options:
        """Return the options of partitioning.

        Raises
        ------
        InputError
            If a value is not allowed; the message names the argument.
        """
        if not isinstance(self.reading, Mapping):
            raise _wrong_type("reading", self.reading, "a mapping of option to value")
        if not isinstance(self.columns, str):
            raise _wrong_type("columns", self.columns, "a text such as 'subject,predicate,object'")
        with in_python():
            return Options(
                seed=whole_number("seed", self.seed),
                columns=parse_columns(self.columns),
                split=AUTO_SPLIT if self.split is None else parse_fractions(_shares(self.split)),
                name=name,
                progress=progress,
                reading=ReadingOptions.from_mapping(self.reading),
            )


_ARGUMENTS = tuple("triples score_function output config settings trainers overwrite progress".split())


def config_file(config: Any) -> Path | None:
    """Return the file of a configuration: a path, or the name of a recipe."""
    if config is None:
        return None
    if not isinstance(config, (str, os.PathLike)):
        raise _wrong_type("config", config, "a YAML file or the name of a recipe")
    path, name, recipes = Path(config), str(config), recipe_files()
    if name in recipes and not path.is_file():
        return recipes[name]
    if not path.exists() and path.suffix not in (".yaml", ".yml", ".json"):
        raise InputError(f"config: there is no file {config}, and {unknown_name('recipe', name, recipes)}")
    return path


def overrides(settings: Any, score_function: Any, output: Any = None) -> list[str]:
    """Return the overrides KEY=VALUE of all settings."""
    if settings is not None and not isinstance(settings, Mapping):
        raise _wrong_type("settings", settings, "a mapping of field to value")
    if score_function is not None and not isinstance(score_function, str):
        raise _wrong_type("score_function", score_function, f"a name: {', '.join(SCORE_FUNCTIONS)}")
    values = dict(flat(settings or {}))
    if score_function is not None:
        values["model.score_function"] = score_function
    if output is not None:
        if not isinstance(output, (str, os.PathLike)) or not os.fspath(output):
            raise InputError(f"output is {output!r}; expected the path of a folder")
        values["output"] = output
    name = values.get("model.score_function")
    # TransE too, so that transe_l1 is near it.
    if isinstance(name, str) and any(known.startswith(name.lower()) for known in SCORE_FUNCTIONS):
        values["model.score_function"] = name.lower()
    return [f"{name}={_as_yaml(name, value)}" for name, value in values.items()]


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of nested settings."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _as_yaml(name: str, value: Any) -> str:
    """Return a value as the right side of KEY=VALUE."""

    def plain(item: Any) -> Any:
        """Return numbers and arrays of numpy and torch as Python's, paths as texts."""
        if hasattr(item, "tolist"):
            return item.tolist()
        if isinstance(item, os.PathLike):
            return os.fspath(item)
        expected = "a number, a text, true or false, or lists and mappings of them"
        raise _wrong_type(f"settings: {name}", item, expected)

    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    # JSON is YAML; a text stays as it is, as on the command line.
    return value if isinstance(value, str) else json.dumps(value, default=plain)


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """Return a number of Python or numpy as an int."""
    try:
        number = operator.index(value)
    except TypeError:
        raise _wrong_type(name, value, "a whole number") from None
    if number < least:
        raise InputError(f"{name} is {number}; expected at least {least}")
    return number


def _shares(split: Any) -> str:
    """Return shares as the text of ``--split``."""
    if isinstance(split, str):
        return split
    try:
        return ",".join(str(float(share)) for share in (split if hasattr(split, "__len__") else [split]))
    except (TypeError, ValueError):
        raise _wrong_type("split", split, "the share of train, or those of train, valid and test") from None


def _wrong_type(name: str, value: Any, expected: str) -> InputError:
    return InputError(f"{name} is {str(value)[:80]!r}, of type {type(value).__name__}; expected {expected}")


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """Let messages name arguments of :func:`dglkge.train` in place of options of the command line."""
    try:
        yield
    except InputError as error:
        raise InputError(pythonic(str(error))) from error


def pythonic(text: str) -> str:
    """Return a text with options of the command line as arguments of :func:`dglkge.train`."""
    return re.sub(r"--([a-z-]+)", lambda option: option[1].replace("-", "_"), text)
