"""Search spaces: a YAML file with a base configuration, the fields to search, and the search's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dglkge.config import Config, field_table, load_config
from dglkge.errors import InputError, unknown_name

Value = str | int | float | bool

SECTIONS = ("config", "set", "space", "search")
RANGE_KEYS = ("low", "high", "log", "step")
NOT_SEARCHED = ("dataset", "output", "seed", "imports", "training.num_epochs", "evaluation.split")
"""Fields that the search sets itself, or that a result would not be comparable under."""


@dataclass(frozen=True)
class Parameter:
    """Values of one field.

    Attributes
    ----------
    key : str
        The field, with dots.
    choices : tuple, optional
        Values to choose from; else a range.
    low, high : int or float
        Both ends of a range; whole numbers where both are.
    log : bool
        Whether the logarithm is uniform.
    step : int or float, optional
        Distance between the values of a range.
    """

    key: str
    choices: tuple[Value, ...] | None = None
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether a range has whole numbers only."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def examples(self) -> tuple[Value, ...]:
        """All choices, or both ends of the range."""
        return (self.low, self.high) if self.choices is None else self.choices


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search.

    Attributes
    ----------
    trials : int
        Of the first rung.
    reduction : int
        Of this many trials the best goes on.
    budget : float
        Most cost of the search and of the winner's training, in full trainings.
    seed : int
        Of the sampled settings and of the subgraphs.
    """

    trials: int = 64
    reduction: int = 4
    budget: float = 3.0
    seed: int = 0


@dataclass(frozen=True)
class Space:
    """A search space.

    Attributes
    ----------
    config : str or None
        Path of the base configuration; None for the defaults.
    overrides : tuple of str
        ``key=value``, applied to the base.
    parameters : tuple of Parameter
    search : SearchSettings
    """

    config: str | None
    overrides: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    search: SearchSettings

    def configuration(self, values: Mapping[str, Value], more: Sequence[str] = ()) -> Config:
        """Return the base with values of parameters, and then with more overrides.

        Raises
        ------
        InputError
            If a value is not allowed.
        """
        chosen = [f"{key}={as_text(value)}" for key, value in values.items()]
        return load_config(self.config, [*self.overrides, *chosen, *more])


def as_text(value: Value) -> str:
    """Return a value as an override has it."""
    return (
        str(value).lower()
        if isinstance(value, bool)
        else repr(value)
        if isinstance(value, float)
        else str(value)
    )


def load_space(path: Path, overrides: Sequence[str] = ()) -> Space:
    """Read a search space and check each value against the configuration's fields.

    Parameters
    ----------
    path : Path
        YAML with ``config`` (path of the base, as from the current folder), ``set`` (fields of the base),
        ``space`` (for each field a list of choices, or low, high and, if wanted, log and step) and ``search``
        (trials, reduction, budget, seed). Only ``space`` is needed.
    overrides : sequence of str
        ``key=value``, applied after ``set``.

    Raises
    ------
    InputError
        For a file that cannot be read, an unknown key, or a value that is not allowed.
    """
    content = _read(path)
    _check_keys(path, "", content, SECTIONS)
    base = content.get("config")
    if base is not None and not isinstance(base, str):
        raise InputError(f"{path}: config is {base!r}; allowed: the path of a configuration")
    given = [f"{key}={as_text(value)}" for key, value in _flat(path, content.get("set") or {}).items()]
    fields = _mapping(path, "space", content.get("space"))
    space = Space(
        base,
        (*given, *overrides),
        tuple(_parameter(path, key, values) for key, values in fields.items()),
        _search_settings(path, content.get("search") or {}),
    )
    if not space.parameters:
        raise InputError(f"{path}: space has no field; give at least one, e.g. optimizer.lr: [0.05, 0.1]")
    space.configuration({})
    for parameter in space.parameters:
        for value in parameter.examples:
            space.configuration({parameter.key: value})
    return space


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the search space {path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise InputError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    return _mapping(path, "the file", content)


def _mapping(path: Path, what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{path}: {what} is {value!r}; allowed: 'key: value' lines")
    return value


def _check_keys(path: Path, prefix: str, found: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in found:
        if key not in known:
            raise InputError(f"{path}: {prefix}{unknown_name('key', key, known)}")


def _flat(path: Path, values: Any, prefix: str = "") -> dict[str, Value]:
    """Return nested mappings as one, with dotted keys."""
    found: dict[str, Value] = {}
    for key, value in _mapping(path, f"set {prefix}".strip(), values).items():
        if isinstance(value, dict):
            found.update(_flat(path, value, f"{prefix}{key}."))
        else:
            found[prefix + key] = value
    return found


def _parameter(path: Path, key: str, values: Any) -> Parameter:
    known = [name for name, *_ in field_table() if name not in NOT_SEARCHED]
    if key in NOT_SEARCHED:
        raise InputError(f"{path}: space: {key} cannot be searched")
    if key not in known:
        raise InputError(f"{path}: space: {unknown_name('field', key, known)}")
    where = f"{path}: space: {key}"
    if isinstance(values, list):
        if not values or not all(isinstance(value, (str, int, float, bool)) for value in values):
            raise InputError(f"{where} is {values!r}; allowed: a list of values")
        if len(set(map(repr, values))) < len(values):
            raise InputError(f"{where} has a value twice: {values!r}")
        return Parameter(key, choices=tuple(_number(value) for value in values))
    if not isinstance(values, dict):
        raise InputError(f"{where} is {values!r}; allowed: a list of choices, or low and high")
    _check_keys(path, f"space: {key}: ", values, RANGE_KEYS)
    low, high, step = (_number(values.get(name)) for name in ("low", "high", "step"))
    log = values.get("log", False)
    for name, value in (("low", low), ("high", high), ("step", step)):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number and not (name == "step" and value is None):
            raise InputError(f"{where}: {name} is {value!r}; allowed: a number")
    if not isinstance(log, bool):
        raise InputError(f"{where}: log is {log!r}; allowed: true or false")
    if not low < high or (log and not low > 0) or (step is not None and not step > 0):
        raise InputError(
            f"{where}: low {low!r}, high {high!r}, step {step!r}; allowed: low below high, a step above 0, "
            "and with log a low above 0"
        )
    if log and step is not None:
        raise InputError(f"{where}: a step does not go with log")
    return Parameter(key, low=low, high=high, log=log, step=step)


def _number(value: Any) -> Any:
    """Return a text such as 1e-3, which YAML 1.1 takes for one, as the number that it is."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _search_settings(path: Path, values: Any) -> SearchSettings:
    found = _mapping(path, "search", values)
    _check_keys(path, "search: ", found, list(SearchSettings.__dataclass_fields__))
    for key, value in found.items():
        kinds = (int, float) if key == "budget" else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds):
            words = "a number" if key == "budget" else "a whole number"
            raise InputError(f"{path}: search: {key} is {value!r}; allowed: {words}")
    settings = SearchSettings(**found)
    if settings.seed < 0:
        raise InputError(f"{path}: search: seed is {settings.seed}; allowed: at least 0")
    return settings
