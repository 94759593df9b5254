"""Texts such as ``TYPE=FILE`` that name files of entities' vectors, and reading them by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dglkge.data.vector_files import open_vectors
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError, unknown_name


@dataclass(frozen=True)
class FeatureFile:
    """A file of vectors, and the entity types whose names are looked up in it."""

    path: Path
    entity_types: list[str]


def feature_files(texts: Sequence[str], entity_types: Sequence[str], field: str) -> list[FeatureFile]:
    """Return the files that texts ``FILE`` or ``TYPE=FILE`` name; nothing is read.

    Parameters
    ----------
    texts : sequence of str
    entity_types : sequence of str
        The known ones. ``FILE`` alone stands for all of them.
    field : str
        For messages.

    Raises
    ------
    InputError
        If a type is unknown, or has two files.
    """
    found = []
    taken: dict[str, str] = {}
    for text in texts:
        name, separator, path = text.partition("=")
        is_typed = bool(separator) and "/" not in name
        if is_typed and name not in entity_types:
            raise InputError(f"{field} has {text!r}: {unknown_name('entity type', name, list(entity_types))}")
        types = [name] if is_typed else list(entity_types)
        for one in types:
            if one in taken:
                raise InputError(
                    f"{field} has {taken[one]!r} and {text!r} for the entity type {one!r}; allowed: one"
                )
            taken[one] = text
        found.append(FeatureFile(Path(path if is_typed else text), types))
    return found


def read_new_vectors(
    path: Path, known: Vocabulary, names: str = "", name_column: str = "name", column: str = "embedding"
) -> tuple[list[str], np.ndarray]:
    """Read the vectors of names that a vocabulary lacks, in the order of the file.

    Parameters
    ----------
    path : Path
    known : Vocabulary
    names, name_column, column : str
        As of :func:`dglkge.data.vector_files.open_vectors`.

    Returns
    -------
    names : list of str
    vectors : (n, F) float32 array

    Raises
    ------
    InputError
        If the file cannot be read, or a name stands in it twice.
    """
    file = open_vectors(path, names, name_column, column)
    old = {file.key(name) for name in known.names}
    places: dict[str, int] = {}
    for number, name in enumerate(file.names()):
        if file.key(name) in old:
            continue
        if name in places:
            raise InputError(
                f"{file.place(number)}: the name {name!r} stands at {file.place(places[name])} already; "
                "allowed is once"
            )
        places[name] = number
    vectors = np.empty((len(places), file.width), np.float32)
    filled = 0
    for numbers, rows in file.rows(np.array(list(places.values()), dtype=np.int64)):
        vectors[filled : filled + len(numbers)] = rows
        filled += len(numbers)
    return list(places), vectors
