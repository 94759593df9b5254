"""Search spaces: a YAML file with a base configuration, the fields to search, and the search's settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dglkge.config import Config, field_table, load_config
from dglkge.config.load import read_tree
from dglkge.errors import InputError, InputErrors, unknown_name
from dglkge.settings import check, expected
from dglkge.train_arguments import overrides

Value = str | int | float | bool
Number = int | float

NOT_SEARCHED = ("dataset", "output", "seed", "imports", "training.num_epochs", "evaluation.split")
"""Fields that the search sets itself, or that a result would not be comparable under."""

_KNOWN_KEYS = ConfigDict(extra="forbid", allow_inf_nan=False)
Whole = Annotated[int, Field(strict=True)]


@dataclass(frozen=True)
class Parameter:
    """Values of one field, by its dotted key: choices, or a range, of whole numbers where both ends are."""

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


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search, see :func:`dglkge.tuning.search.plan_rungs`; the seed is of the subgraphs too."""

    __pydantic_config__ = _KNOWN_KEYS

    trials: Whole = 64
    reduction: Whole = 4
    budget: Annotated[float, Field(strict=True)] = 3.0
    seed: Annotated[Whole, Field(ge=0)] = 0


@dataclass(frozen=True)
class Space:
    """A search space: the path of the base configuration or None, overrides of it, and what is searched."""

    config: str | None
    overrides: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    search: SearchSettings

    def configuration(self, values: Mapping[str, Value], more: Sequence[str] = ()) -> Config:
        """Return the base with values of parameters, and then with more overrides."""
        return load_config(self.config, [*self.overrides, *overrides(values, None), *more])


class _Ends(BaseModel):
    """Both ends of a range, as the file has them."""

    model_config = ConfigDict(**_KNOWN_KEYS, strict=True)

    low: Number
    high: Number
    log: bool = False
    step: Number | None = None

    @property
    def is_ordered(self) -> bool:
        """Whether both ends and the step fit one another."""
        is_step_right = self.step is None or (not self.log and self.step > 0)
        return self.low < self.high and (not self.log or self.low > 0) and is_step_right


_ORDER = "low below high; with log a low above 0; without log a step above 0"
_Range = Annotated[_Ends, check(lambda ends: ends.is_ordered, _ORDER)]
# 1 and true are two.
_once = check(lambda choices: len(set(map(repr, choices))) == len(choices), "each value once")
_Choices = Annotated[list[Value], Field(min_length=1, strict=True), _once]


class _File(BaseModel):
    """A search space as it is written."""

    model_config = _KNOWN_KEYS

    config: Annotated[str, Field(strict=True)] | None = None
    set: dict[str, Any] = {}
    space: Annotated[dict[str, Any], Field(min_length=1)]
    search: SearchSettings = SearchSettings()


def load_space(path: Path, more: Sequence[str] = (), base: str | None = None) -> Space:
    """Read a search space and check each value against the configuration's fields.

    Parameters
    ----------
    path : Path
        YAML with ``config`` (path of the base, as from the current folder), ``set`` (fields of the base),
        ``space`` (for each field a list of choices, or low, high and, if wanted, log and step) and ``search``
        (trials, reduction, budget, seed). Only ``space`` is needed.
    more : sequence of str
        Overrides ``key=value``, applied after ``set``.
    base : str, optional
        Path of the base, instead of ``config``.

    Raises
    ------
    InputError
        For a file that cannot be read, an unknown key, or a value that is not allowed.
    """
    file: _File = _validated(_File, read_tree(path, []).plain(), str(path))
    parameters = tuple(_parameter(f"{path}: space", key, values) for key, values in file.space.items())
    space = Space(base or file.config, (*overrides(file.set, None), *more), parameters, file.search)
    space.configuration({})
    for parameter in space.parameters:
        for value in (parameter.low, parameter.high) if parameter.choices is None else parameter.choices:
            space.configuration({parameter.key: value})
    return space


def _validated(kind: Any, value: Any, where: str) -> Any:
    """Return a value as its type has it; a line for each unknown key and for each value not allowed."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    lines = []
    for problem in problems:
        *sections, name = map(str, problem["loc"] or ("the value",))
        place = ".".join((*sections, name))
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            model = SearchSettings if sections else getattr(kind, "__origin__", kind)
            lines.append(f"{where}: {unknown_name('key', name, inspect.signature(model).parameters)}")
        elif problem["type"] == "missing":
            lines.append(f"{where}: {place} is not given")
        else:
            lines.append(f"{where}: {place} is {problem['input']!r}; {expected(problem, '')}")
    raise InputErrors(list(dict.fromkeys(lines)))


def _parameter(where: str, key: str, values: Any) -> Parameter:
    known = [name for name, *_ in field_table() if name not in NOT_SEARCHED]
    if key in NOT_SEARCHED:
        raise InputError(f"{where}: {key} cannot be searched")
    if key not in known:
        raise InputError(f"{where}: {unknown_name('field', key, known)}")
    if isinstance(values, list):
        return Parameter(key, choices=tuple(_validated(_Choices, values, f"{where}: {key}")))
    if not isinstance(values, dict):
        raise InputError(f"{where}: {key} is {values!r}; allowed: a list of choices, or low and high")
    return Parameter(key, **_validated(_Range, values, f"{where}: {key}").model_dump())
