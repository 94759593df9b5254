"""Base of all settings: frozen pydantic models that read each value by the type of its field.

A component declares its settings as a subclass of :class:`Settings`, beside itself: the docstring behind a
field is its help, and a resume may not change it unless it is :data:`free` or :data:`until_finished`. The
sections of the configuration (``dglkge/config/schema.py``) are such classes too. A field of them may hold the
settings of one member of a registry, a tagged union: the tag is the member's name, and the members are those
that are registered when a configuration is read, the user's own among them.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from dglkge.errors import InputError
from dglkge.registry import registry_of

FIXED = "fixed"
"""The field must have the same value in a resume: another value makes another model."""
UNTIL_FINISHED = "until finished"
"""The field may change while there are epochs left to train; the run's later versions record it."""
FREE = "free"
"""The field may change in every resume: it changes no number of the model."""

# Decimal digits only. YAML 1.1 reads 0123 as octal 83 and 12:30 as base 60; a person means neither.
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9][0-9_]*")
_HEXADECIMAL = re.compile(r"[+-]?0x[0-9a-fA-F]+")
_EXPONENT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][+-]?[0-9]+")

EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}

ALLOWED = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "a number above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
    "finite_number": "a finite number",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), EXPECTED[int]),
    **dict.fromkeys(("float_parsing", "float_type"), EXPECTED[float]),
    **dict.fromkeys(("bool_parsing", "bool_type"), EXPECTED[bool]),
    "string_type": EXPECTED[str],
    "too_short": "at least {min_length}",
}
"""What pydantic's types of errors allow, with the numbers of their context."""


@dataclass(eq=False)
class Scalar:
    """A single value of a file or an override.

    Attributes
    ----------
    value : object
        As YAML 1.1 reads it, which takes 0123 for 83, 12:30 for 750, and an empty text for null.
    text : str
        As it was written, without quotes; empty for null.
    where : str
        Where it was written, for messages.
    """

    value: Any
    text: str
    where: str

    def plain(self) -> Any:
        """Return the value, as :func:`read_as` reads numbers; 1e-3 is one, which YAML 1.1 reads as a text."""
        is_text = isinstance(self.value, str) and not _EXPONENT.fullmatch(self.text)
        if is_text or self.value is None or isinstance(self.value, bool):
            return self.value
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return _read_scalar(self, kind)
        return self.text

    def shown(self) -> Any:
        """Return the value as messages have it: as it was written, unless it is true or false or a number."""
        is_plain = isinstance(self.value, (bool, float)) or str(self.value) == self.text
        return self.value if is_plain else self.text


class Items(list[Any]):
    """A list of a file or an override, with the text of an override."""

    def __init__(self, where: str, text: str | None = None) -> None:
        super().__init__()
        self.where, self.text = where, text

    def plain(self) -> list[Any]:
        """Return the list with plain values."""
        return [item.plain() for item in self]

    shown = plain


class Tree(dict[str, Any]):
    """A mapping of a file or an override, with the text of an override."""

    def __init__(self, where: str = "", text: str | None = None) -> None:
        super().__init__()
        self.where, self.text = where, text

    def plain(self) -> dict[str, Any]:
        """Return the mapping with plain values."""
        return {key: value.plain() for key, value in self.items()}

    shown = plain


def _resumable(resume: str, default: Any = ..., *, component: str = "", **limits: Any) -> Any:
    """Declare a field that may change in a resume; further arguments are pydantic's ``ge``, ``gt`` and so on.

    ``component``: for a field that names components, the noun of their registry
    (:data:`dglkge.registry.HOMES`). The help of the field then lists the registered names.
    """
    extra: dict[str, Any] = {"resume": resume, **({"component": component} if component else {})}
    return Field(default, json_schema_extra=extra, **limits)


free = functools.partial(_resumable, FREE)
"""Declares a field that may change in every resume."""
until_finished = functools.partial(_resumable, UNTIL_FINISHED)
"""Declares a field that may change while there are epochs left to train."""


def help_of(field: FieldInfo) -> str:
    """Return the help of a field, the docstring behind it."""
    return _help(field.description or "")


def _help(docstring: str) -> str:
    """Return a docstring on one line, without its last dot."""
    return " ".join(docstring.split()).removesuffix(".")


def _describe(schema: dict[str, Any]) -> None:
    """Leave the help of the fields in a JSON Schema. Docstrings of classes are for readers of the code."""
    schema.pop("description", None)
    for described in schema.get("properties", {}).values():
        if "description" in described:
            described["description"] = _help(described["description"])


def check(holds: Callable[[Any], object], allowed: str) -> AfterValidator:
    """Return a check of a value; ``allowed`` describes what passes."""

    def checked(value: Any) -> Any:
        if not holds(value):
            raise ValueError(allowed)
        return value

    return AfterValidator(checked)


def not_empty(allowed: str) -> AfterValidator:
    """Return a check that a text is given."""
    return check(bool, allowed)


Text = Annotated[str, not_empty("a non-empty text")]


class Settings(BaseModel):
    """A group of settings: immutable, without unknown keys, each number finite."""

    model_config = ConfigDict(
        frozen=True,
        use_attribute_docstrings=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra=_describe,
    )

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        return read_as(value, cls.model_fields[str(info.field_name)].annotation)

    def changed(self, **values: Any) -> Any:
        """Return a copy with other values of some fields, which are not checked."""
        return self.model_copy(update=values)


class ComponentSettings(Settings):
    """Settings of a component; a member of a registry declares a subclass of its family's as ``Settings``."""

    name: str = ""
    """name of the component."""

    def __str__(self) -> str:
        return self.name

    def options(self, family: type[ComponentSettings]) -> dict[str, Any]:
        """Return what a member has beside the settings of its family, by name."""
        return {
            name: getattr(self, name) for name in type(self).model_fields if name not in family.model_fields
        }


class FreeSettings(Settings):
    """Settings of a class of another library, which has and checks the further options."""

    model_config = ConfigDict(extra="allow")

    name: Text
    """name of the class."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read_options(cls, values: Any) -> Any:
        if isinstance(values, str):
            return {"name": values}
        if not isinstance(values, Tree):
            return values
        return {key: value if key in cls.model_fields else value.plain() for key, value in values.items()}

    @property
    def options(self) -> dict[str, Any]:
        """The further options by name."""
        return dict(self.model_extra or {})

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.name} with {options or 'no options'}"


def at_least_or(special: float, low: float) -> AfterValidator:
    """Return a check that a number is a special one or at least ``low``."""
    return check(lambda value: value == special or value >= low, f"{special:g}, or at least {low:g}")


def expected(problem: Mapping[str, Any], value: Any) -> str:
    """Return what is allowed in place of a value, and the nearest name, by one of pydantic's ``errors()``."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "value_error":
        return f"allowed: {context['error']}"
    if kind != "literal_error":
        return f"allowed: {ALLOWED[kind].format(**context) if kind in ALLOWED else problem['msg']}"
    names = re.findall(r"'([^']*)'", context["expected"]) or context["expected"].split(" or ")
    near = difflib.get_close_matches(str(value), names, n=1)
    return f"allowed: one of {', '.join(names)}" + (f"; did you mean {near[0]!r}?" if near else "")


Member = TypeVar("Member", bound=ComponentSettings)


def settings_of(noun: str, of: type[Member], values: Mapping[str, Any]) -> Member:
    """Return the settings of a component from values in Python."""
    try:
        return of.model_validate(dict(values), strict=True)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
    name, option = values.get("name", ""), ".".join(map(str, problem["loc"]))
    if problem["type"] != "extra_forbidden":
        raise InputError(f"{option} of the {noun} {name!r} is {problem['input']!r}; {expected(problem, '')}")
    known = ", ".join(repr(field) for field in of.model_fields if field != "name") or "none"
    raise InputError(f"the {noun} {name!r} has no option {option!r}; its options: {known}")


def read_as(value: Any, kind: Any) -> Any:
    """Return a value of a file as the type of its field; values of another origin are returned unchanged.

    The field decides how a text is read, not YAML: a text stays as it was written, and a whole number is
    decimal (or hexadecimal after 0x).
    """
    if not isinstance(value, (Scalar, Items, Tree)):
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return read_as(value, arguments[0])
    if origin in (Union, types.UnionType):
        if isinstance(value, Scalar) and value.value is None:
            return None
        return read_as(value, next(argument for argument in arguments if argument is not type(None)))
    if origin is Literal:
        return read_as(value, type(arguments[0]))
    if origin is tuple:
        return _read_tuple(value, arguments[0])
    if origin in (dict, Mapping):
        return _read_mapping(value, arguments[1])
    if kind in EXPECTED:
        if kind is str and value.text is not None:
            return value.text
        if not isinstance(value, Scalar):
            raise ValueError(EXPECTED[kind])
        return _read_scalar(value, kind)
    if isinstance(value, Scalar) and isinstance(kind, type):
        # A section without a line below it, or the name of a class without options.
        return (
            {} if value.value is None else {"name": value.text} if issubclass(kind, FreeSettings) else value
        )
    return value


def _read_tuple(value: Any, kind: Any) -> tuple[Any, ...]:
    """Read a list, or one value for a list of one."""
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    items = value
    if isinstance(value, Scalar):
        items = [value] if value.text else []
    expected = f"{EXPECTED[kind]} or a list of {EXPECTED[kind].split(' ', 1)[1]}s"
    if isinstance(items, Tree):
        raise ValueError(expected)
    for item in items:
        # A number is not taken for a text in a list: [1] is no name of a module.
        if not isinstance(item, Scalar) or (kind is str and not isinstance(item.value, str)):
            raise ValueError(expected)
    return tuple(_read_scalar(item, kind) for item in items)


def _read_mapping(value: Any, kind: Any) -> dict[str, Any]:
    """Read a mapping of names to values."""
    if isinstance(value, Scalar) and value.value is None:
        return {}
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    try:
        return {name: read_as(item, kind) for name, item in value.items()}
    except (AttributeError, ValueError):
        raise ValueError(f"a mapping, {{NAME: VALUE}}, each value {EXPECTED[kind]}") from None


def _read_scalar(scalar: Scalar, kind: type) -> Any:
    """Read a single value."""
    text, value = scalar.text, scalar.value
    if kind is str:
        return text
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and _WHOLE_NUMBER.fullmatch(text):
        return int(text.replace("_", ""))
    if kind is int and _HEXADECIMAL.fullmatch(text):
        return int(text, 16)
    number = _number(text) if kind is float else None
    if number is None:
        raise ValueError(EXPECTED[kind])
    if not math.isfinite(number):
        raise ValueError("a finite number")
    return number


def _number(text: str) -> float | None:
    """Return a number; None for another text. YAML 1.1 reads 1e-3, which has no dot, as a text."""
    try:
        # YAML spells infinity .inf and NaN .nan.
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        return None


TAG = "name"
"""Key of a component's name: `loss: hinge` is short for `loss: {name: hinge}`."""

UNKNOWN_COMPONENT = "unknown_component"
"""Type of pydantic's error about an unknown name."""


@dataclass(eq=False)
class Component:
    """Annotation of a field: the settings of a member of a registry (:data:`dglkge.registry.HOMES`).

    Parameters
    ----------
    is_section : bool
        Whether the field is a section of the file, of which the tag is one line, as ``loss.name`` is. If not,
        the name alone is usual: ``model.score_function: rotate``.
    values : mapping of str to class of settings, optional
        Names that are no member of the registry, and stand for a choice among the members.
    settings_of : callable, optional
        Returns the class of a member's settings; by default ``member.Settings``.
    """

    noun: str
    default: str
    is_section: bool = True
    values: Mapping[str, type[ComponentSettings]] = field(default_factory=dict)
    settings_of: Callable[[Any], type[ComponentSettings]] = lambda member: member.Settings

    def settings(self, name: str) -> type[ComponentSettings]:
        """Return the class of a member's settings; InputError if the name is not registered."""
        return self.values.get(name) or self.settings_of(registry_of(self.noun).get(name))

    def default_settings(self) -> ComponentSettings:
        """Return the settings of the default member."""
        return self.settings(self.default)(name=self.default)

    def field(self) -> Any:
        """Declare a field that holds the settings of the default member unless others are given."""
        return Field(default_factory=self.default_settings)

    def members(self) -> Iterator[tuple[str, type[ComponentSettings]]]:
        """Yield (name, class of its settings) of each member, the default first."""
        names = sorted([*self.values, *registry_of(self.noun)], key=lambda name: name != self.default)
        return ((name, self.settings(name)) for name in names)

    def options(self) -> dict[str, dict[str, FieldInfo]]:
        """Return the options of all members: by option, then by the names of those that have it."""
        options: dict[str, dict[str, FieldInfo]] = {}
        for name, settings in self.members():
            for option, described in settings.model_fields.items():
                if option != TAG:
                    options.setdefault(option, {})[name] = described
        return options

    def read(self, value: Any) -> Any:
        """Return the settings that a mapping, or a name alone, describes."""
        if isinstance(value, ComponentSettings):
            return value
        if isinstance(value, (str, Scalar)):
            value = {} if getattr(value, "value", "") is None else {TAG: value}
        if not isinstance(value, Mapping):
            raise ValueError("a name, or a mapping with a name and options")
        tag = value.get(TAG, self.default)
        name = tag.text if isinstance(tag, Scalar) else str(tag)
        try:
            settings = self.settings(name)
        except InputError as error:
            raise PydanticCustomError(UNKNOWN_COMPONENT, "{text}", {"text": str(error)}) from None
        return settings.model_validate({**value, TAG: name})

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        """Read the field by :meth:`read`."""
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: pydantic.GetJsonSchemaHandler) -> Any:
        """Describe the union of all members."""
        names = [name for name, _ in self.members()]
        choices: list[dict[str, Any]] = [{"type": "string", "enum": names}]
        if registry_of(self.noun).is_open:
            choices.append({"type": "string", "description": "a systematic name"})
        for name, settings in self.members():
            described = {**handler.resolve_ref_schema(handler(settings.__pydantic_core_schema__))}
            described["properties"] = {**described["properties"], TAG: {"type": "string", "const": name}}
            if name != self.default:
                described["required"] = [*described.get("required", []), TAG]
            choices.append(described)
        return {"anyOf": choices}


def component_of(field: FieldInfo) -> Component | None:
    """Return the component of a field, None if it is another field."""
    return next((entry for entry in field.metadata if isinstance(entry, Component)), None)
