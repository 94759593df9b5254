"""Small two-column files: entity types and id maps."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from dglkge.data.text_format import is_gz, text_format
from dglkge.errors import InputError


def read_pairs(
    path: Path, nouns: tuple[str, str], more_columns: bool = False
) -> Iterator[tuple[int, str, str]]:
    """Read lines of two fields, separated by a tab, or by a comma in a ``.csv`` file; also with ``.gz``.

    Parameters
    ----------
    path : Path
        The file.
    nouns : (str, str)
        What the two fields are, for error messages.
    more_columns : bool
        Whether a line may have more fields, which are not read.

    Yields
    ------
    line_number, first, second

    Raises
    ------
    InputError
        If the file is missing, empty, not UTF-8 or has a line with another number of columns.
    """
    text = text_format(path, None)
    number = 0
    try:
        with gzip.open(path, "rb") if is_gz(path) else open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if line == "":
                    continue
                fields = text.split(line)
                if len(fields) < 2 or (len(fields) > 2 and not more_columns):
                    raise InputError(
                        f"{path}:{number}: got {len(fields)} columns, expected {nouns[0]} and {nouns[1]}"
                    )
                if "" in fields[:2]:
                    raise InputError(f"{path}:{number}: the {nouns[fields.index('')]} is empty")
                yield number, fields[0], fields[1]
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{number}: byte {error.start + 1} of the line is not UTF-8") from error
    except ValueError as error:
        raise InputError(f"{path}:{number}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if number == 0:
        raise InputError(f"{path}: the file is empty")


def read_id_map(path: Path, noun: str) -> list[str]:
    """Read lines of integer id and name, in any order, and return the names by id.

    Raises
    ------
    InputError
        If the ids are not 0 to n - 1, each once, or two have the same name.
    """
    names: dict[int, str] = {}
    line_of_name: dict[str, int] = {}
    for line, id_text, name in read_pairs(path, (f"{noun} id", f"{noun} name")):
        if not (id_text.isascii() and id_text.isdigit()):
            raise InputError(f"{path}:{line}: the {noun} id is {id_text!r}, expected an integer from 0")
        if int(id_text) in names:
            raise InputError(f"{path}:{line}: the {noun} id {int(id_text)} stands here a second time")
        if name in line_of_name:
            raise InputError(
                f"{path}:{line}: the {noun} name {name!r} stands here and in line {line_of_name[name]}"
            )
        names[int(id_text)] = name
        line_of_name[name] = line
    if not names:
        raise InputError(f"{path}: the file is empty")
    missing = next((id_ for id_ in range(len(names)) if id_ not in names), None)
    if missing is not None:
        raise InputError(f"{path}: {len(names)} {noun} ids reach {max(names)}, but {missing} is missing")
    return [names[id_] for id_ in range(len(names))]
