"""Reads which type each entity has."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from dglkge.errors import InputError
from dglkge.typing import RELATION
from partition_tools.map_file import read_pairs

DEFAULT_TYPE = "entity"
_TYPE_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def types_of_entities(
    path: Path | None, entities: list[str], integer_ids: bool
) -> tuple[list[str], np.ndarray]:
    """Return the types and the type of each entity.

    Parameters
    ----------
    path : Path or None
        Lines of entity and type (more columns are not read). None: one type, ``entity``.
    entities : list of str
        The names of all entities.
    integer_ids : bool
        Whether the file has the entities' integer ids instead of their names.

    Returns
    -------
    types : list of str
        The types that entities have, sorted.
    type_of : (n,) int32
        Index of each entity's type.

    Raises
    ------
    InputError
        If an entity has no type or two, or a type's name cannot be used.
    """
    if path is None:
        return [DEFAULT_TYPE], np.zeros(len(entities), dtype=np.int32)
    given: dict[str, str] = {}
    for line, entity, type_ in read_pairs(path, ("entity", "type"), more_columns=True):
        if given.setdefault(entity, type_) != type_:
            raise InputError(
                f"{path}:{line}: entity {entity!r} has type {type_!r}, a line before says {given[entity]!r}"
            )
        fault = type_name_fault(type_)
        if fault:
            raise InputError(f"{path}:{line}: {fault}")
    keys = [str(id_) for id_ in range(len(entities))] if integer_ids else entities
    untyped = [key for key in keys if key not in given]
    if untyped:
        raise InputError(
            f"{path}: {len(untyped)} entities of the triples have no type, the first is {untyped[0]!r}"
        )
    types = sorted({given[key] for key in keys})
    index = {type_: place for place, type_ in enumerate(types)}
    return types, np.array([index[given[key]] for key in keys], dtype=np.int32)


def type_name_fault(name: str) -> str | None:
    """Return why a name cannot be an entity type's, or None."""
    if not _TYPE_NAME.fullmatch(name) or "__" in name:
        return f"the type {name!r} is not allowed: only letters, digits, '.', '-' and single '_' are"
    if name == RELATION:
        return f"the type {name!r} is not allowed: it is the name of the relations' table"
    return None
