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
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

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
    "tuple_type": "a value or a list of values",
    "dict_type": "a mapping, {{NAME: VALUE}}",
}
"""What pydantic's types of errors allow, with the numbers of their context."""


NULL, BOOL, TEXT = (f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "str"))


class Written(str):
    """A single value of a file or an override as it was written, without quotes; empty for null.

    Pydantic reads it by the type of its field, and has it in its errors. ``tag`` is YAML's type of it, empty
    in quotes; ``where`` is the place, for messages.
    """

    tag: str
    where: str

    @classmethod
    def of(cls, text: str, tag: str, where: str) -> Written:
        """Make a value."""
        made = cls("" if tag == NULL else text)
        made.tag, made.where = tag, where
        return made

    def __repr__(self) -> str:
        return str(self) if self and self.tag not in ("", TEXT) else super().__repr__()

    def plain(self) -> Any:
        """Return what it is without a field: a number as Python reads it, which takes 1e-3, else as YAML."""
        if self.tag in (NULL, BOOL):
            return None if self.tag == NULL else self.lower() in ("yes", "true", "on")
        is_quoted, is_word = not self.tag, self.isalpha()  # infinity and nan are words
        for kind in () if is_quoted or is_word else (int, float):
            with contextlib.suppress(ValueError):
                return kind(self)
        return str(self)


class Items(list[Any]):
    """A list of a file or an override, with the text of an override."""

    def __init__(self, where: str, text: str | None = None) -> None:
        super().__init__()
        self.where, self.text = where, text

    def plain(self) -> list[Any]:
        """Return the list with plain values."""
        return [item.plain() for item in self]


class Tree(dict[str, Any]):
    """A mapping of a file or an override, with the text of an override."""

    def __init__(self, where: str = "", text: str | None = None) -> None:
        super().__init__()
        self.where, self.text = where, text

    def plain(self) -> dict[str, Any]:
        """Return the mapping with plain values."""
        return {key: value.plain() for key, value in self.items()}


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
        """Take the text of an override, one value for a list of one, and null for what is empty."""
        kind: Any = cls.model_fields[str(info.field_name)].annotation
        is_optional = type(None) in get_args(kind)
        if kind is str or (is_optional and str in get_args(kind)):
            value = value if getattr(value, "text", None) is None else Written.of(value.text, "", value.where)
        if not isinstance(value, Written):
            return value
        if get_origin(kind) is tuple:
            return [value] if value else []
        if get_origin(kind) is Literal and not isinstance(get_args(kind)[0], str):
            return value.plain()
        if value.tag != NULL:
            return value
        is_scalar = kind in EXPECTED or get_origin(kind) is Literal
        return None if is_optional else value if is_scalar else Tree(value.where)

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
        if isinstance(value, str):
            value = {TAG: value}
        if not isinstance(value, Mapping):
            raise ValueError("a name, or a mapping with a name and options")
        tag = value.get(TAG, self.default)
        name = str(tag)
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
