"""Fields of the configuration that hold the settings of one member of a registry: a tagged union.

The tag is the member's name. The members, and so the allowed options, are those that are registered when a
configuration is read, the user's own among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from dglkge.errors import InputError
from dglkge.registry import registry_of
from dglkge.settings import ComponentSettings, Scalar

TAG = "name"
"""Key of a component's name: `loss: hinge` is short for `loss: {name: hinge}`."""

UNKNOWN_COMPONENT = "unknown_component"
"""Type of pydantic's error about an unknown name."""


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

    def __init__(
        self,
        noun: str,
        default: str,
        is_section: bool = True,
        values: Mapping[str, type[ComponentSettings]] | None = None,
        settings_of: Callable[[Any], type[ComponentSettings]] = lambda member: member.Settings,
    ) -> None:
        self.noun, self.default, self.is_section = noun, default, is_section
        self.values, self._settings_of = dict(values or {}), settings_of

    def settings(self, name: str) -> type[ComponentSettings]:
        """Return the class of a member's settings; InputError if the name is not registered."""
        return self.values.get(name) or self._settings_of(registry_of(self.noun).get(name))

    def default_settings(self) -> ComponentSettings:
        """Return the settings of the default member."""
        return self.settings(self.default)(name=self.default)

    def members(self) -> Iterator[tuple[str, type[ComponentSettings]]]:
        """Yield (name, class of its settings) of each member, the default first."""
        names = sorted([*self.values, *registry_of(self.noun)], key=lambda name: name != self.default)
        return ((name, self.settings(name)) for name in names)

    def options(self) -> dict[str, dict[str, FieldInfo]]:
        """Return the options of all members: by option, then by the names of those that have it."""
        found: dict[str, dict[str, FieldInfo]] = {}
        for name, settings in self.members():
            for option, field in settings.model_fields.items():
                if option != TAG:
                    found.setdefault(option, {})[name] = field
        return found

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

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Read the field by :meth:`read`."""
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Any:
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
    return next((one for one in field.metadata if isinstance(one, Component)), None)
