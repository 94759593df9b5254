"""Files of triples: which column holds what, how lines are split, and what a field may hold."""

from __future__ import annotations

import bz2
import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dglkge.errors import InputError, os_errors

MAX_ID_DIGITS = 18
"""Of an id in a file: any number of so many digits fits into 64 bits."""

ROLES = ("head", "relation", "tail")
WEIGHT = "weight"
TIME = "time"
_LETTERS = {"h": "head", "r": "relation", "t": "tail", "w": WEIGHT, "T": TIME}
_FORMS = (
    "allowed are roles in the order of the columns (head,relation,tail[,weight][,time] or hrt, hrtT, ...), "
    "role=name pairs (head=subject,relation=predicate,tail=object) "
    "or the names of the head, relation and tail columns (subject,predicate,object)"
)


@dataclass(frozen=True)
class Columns:
    """Columns of the parts of a triple.

    Attributes
    ----------
    order : tuple of str
        The roles, in the order of the columns of a file without a header.
    names : mapping of str to str
        The column name of each role; the file then has a header. Empty: by place, unless the header of
        a CSV or Parquet file has the roles themselves as names.
    """

    order: tuple[str, ...] = ROLES
    names: dict[str, str] = field(default_factory=dict)

    @property
    def names_or_roles(self) -> dict[str, str]:
        """Column name of each role, where columns have names."""
        return self.names or {role: role for role in self.order}


def parse_columns(text: str) -> Columns:
    """Parse the ``--columns`` option; raises InputError if a role is missing or stands twice.

    The text is roles in order (``head,relation,tail,time`` or ``hrtT``), ``role=name`` pairs, or three or
    four column names standing for head, relation, tail and weight.

    Examples
    --------
    >>> parse_columns("htr").order
    ('head', 'tail', 'relation')
    >>> parse_columns("subject,predicate,object").names["tail"]
    'object'
    """
    items = [item.strip() for item in text.split(",")]
    # Three names are needed, so a single item can only be letters of roles.
    if len(items) == 1 and set(items[0]) <= set(_LETTERS):
        items = [_LETTERS[letter] for letter in items[0]]
    names: dict[str, str] = {}
    if all("=" in item for item in items):
        pairs = [item.split("=", 1) for item in items]
        roles = [role.strip() for role, _ in pairs]
        names = {role.strip(): name.strip() for role, name in pairs}
    elif any("=" in item for item in items):
        raise InputError(f"--columns {text!r} mixes role=name with bare names; {_FORMS}")
    elif set(items) <= {*ROLES, WEIGHT, TIME}:
        roles = items
    else:
        roles = [*ROLES, WEIGHT][: len(items)]
        names = dict(zip(roles, items))
        if len(items) > 4:
            raise InputError(f"--columns {text!r} names {len(items)} columns; {_FORMS}")
    if sorted(roles) not in [sorted([*ROLES, *more]) for more in ((), (WEIGHT,), (TIME,), (TIME, WEIGHT))]:
        raise InputError(f"--columns {text!r} does not give head, relation and tail once each; {_FORMS}")
    if names and (len(set(names.values())) < len(names) or "" in names.values()):
        raise InputError(f"--columns {text!r} gives an empty column name or one name twice; {_FORMS}")
    return Columns(tuple(roles), names)


EXTENSIONS = (".tsv", ".txt", ".csv", ".parquet")
_DELIMITER_NAMES = {"tab": "\t", "\\t": "\t", "comma": ",", "space": " ", "semicolon": ";", "pipe": "|"}


@dataclass(frozen=True)
class TextFormat:
    """Format of a line of text: the delimiter, and whether fields may stand in double quotes (CSV).

    Without quotes every character stands for itself.
    """

    delimiter: str
    quoted: bool

    def split(self, line: str) -> list[str]:
        """Return the fields of a line; raises ValueError if a quote is never closed."""
        if not self.quoted:
            return line.split(self.delimiter)
        try:
            # strict: without it, the csv module accepts a quote that is never closed.
            return next(csv.reader([line], delimiter=self.delimiter, strict=True), [""])
        except csv.Error as error:
            raise ValueError(f"bad quotes ({error})") from error


_CODECS = {".gz": "gzip", ".bz2": "bz2"}
_OPENERS: dict[str | None, Callable[[Any], Any]] = {"gzip": gzip.open, "bz2": bz2.open, None: lambda raw: raw}
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
"""First bytes of a block of bzip2, and of the end of an empty file, behind four bytes of header."""


def bare_path(path: Path) -> Path:
    """Return a path without the extension of a compression."""
    return path.with_suffix("") if path.suffix.lower() in _CODECS else path


def extension(path: Path) -> str:
    """Return the extension without ``.gz`` or ``.bz2``, in lower case."""
    return bare_path(path).suffix.lower()


def compression(path: Path) -> str | None:
    """Return Arrow's ``"gzip"`` or ``"bz2"`` by the first bytes of a file, else by its name; or None."""
    with open(path, "rb") as file:
        start = file.read(10)
    if start.startswith(b"\x1f\x8b"):
        return "gzip"
    if start.startswith(b"BZh") and start[4:] in _BZIP2_BLOCKS:
        return "bz2"
    return _CODECS.get(path.suffix.lower())


@contextmanager
def open_stream(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file for reading, compressed or not.

    Yields the file as it is, whose position tells progress, and a stream of the uncompressed bytes.
    """
    with open(path, "rb") as raw:
        yield raw, _OPENERS[compression(path)](raw)


def read_errors(
    path: Path, *kinds: type[Exception], action: str = "cannot be read"
) -> AbstractContextManager[None]:
    """Raise InputError with the file's name if it cannot be read or is damaged, or at errors of kinds."""
    return os_errors(InputError, f"{path}: {action}", EOFError, zlib.error, *kinds)


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number, from 1, and text of each line of a UTF-8 file, compressed or not.

    Raises InputError if the file is missing, empty, damaged or not UTF-8.
    """
    number = 0
    try:
        with read_errors(path), open_stream(path) as (_, stream):
            for number, line in enumerate(stream, start=1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{number}: byte {error.start + 1} of the line is not UTF-8") from error
    if number == 0:
        raise InputError(f"{path}: the file is empty")


def is_number(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_id(text: str) -> bool:
    """Return whether a text is an integer from 0 on that fits into 64 bits."""
    return text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS


def parse_delimiter(text: str) -> str:
    """Parse the ``--delimiter`` option: one character, or its name; else InputError."""
    delimiter = _DELIMITER_NAMES.get(text, text)
    # Arrow's parser takes one byte, and gives quotes and line ends a meaning of their own.
    if len(delimiter) != 1 or delimiter in '"\n\r' or not delimiter.isascii():
        names = ", ".join(name for name in _DELIMITER_NAMES if name.isalpha())
        raise InputError(f"--delimiter {text!r} is not allowed; give one ASCII character, or {names}")
    return delimiter


_HEADER_WORDS = {
    "head": ("head", "source", "subject", "src", "from", "start", ":start_id", "h", "s"),
    "relation": ("relation", "predicate", "label", "type", "property", "edge", ":type", "rel", "r", "p"),
    "tail": ("tail", "target", "object", "dst", "to", "end", ":end_id", "t", "o"),
}


def edge_list_header(fields: list[str]) -> dict[str, str]:
    """Return the column of each role in the header of an edge list, empty if the line is none.

    Headers of Gephi, NetworkX, Neo4j and the like are known, in small or capital letters. Of several
    candidates the first of the list above is taken: Gephi's ``Label`` is the relation, its ``Type`` says
    "Directed".

    Examples
    --------
    >>> edge_list_header(["Source", "Target", "Type", "Label"])
    {'head': 'Source', 'relation': 'Label', 'tail': 'Target'}
    """
    by_word = {name.strip().lower(): name for name in fields}
    found = {
        role: [by_word[word] for word in words if word in by_word] for role, words in _HEADER_WORDS.items()
    }
    return {role: columns[0] for role, columns in found.items()} if all(found.values()) else {}


def columns_of_header(fields: list[str], columns: Columns) -> dict[str, str]:
    """Return the column of each role in a header, empty if the line is none."""
    if set(columns.order) <= set(fields):
        return {role: role for role in columns.order}
    return edge_list_header(fields) if columns == Columns() else {}


def text_format(path: Path, delimiter: str | None, suffix: str | None = None) -> TextFormat:
    """Return how a text file is split: CSV by commas with quotes, anything else by tabs without.

    The delimiter is the user's choice instead; the suffix stands instead of the file's extension.
    """
    quoted = (suffix or extension(path)) == ".csv"
    return TextFormat(delimiter or ("," if quoted else "\t"), quoted)


@dataclass(frozen=True)
class RowRules:
    """Rules for a row of triples.

    ``limits`` has, with integer ids, for each of head, relation and tail the id that is just too large; it is
    empty where the fields are names.
    """

    limits: dict[str, int] = field(default_factory=dict)

    def first_fault(self, values: Iterable[tuple[str, str]]) -> str | None:
        """Return the fault of the first bad one of the fields (role, text) of a row, or None."""
        return next(filter(None, (self._fault(role, value) for role, value in values)), None)

    def _fault(self, role: str, value: str) -> str | None:
        """Return the fault of one field as text, or None."""
        if role == WEIGHT:
            if not is_number(value):
                return f"the weight is {value!r}, expected a number"
            is_weight = 0 <= float(value) < math.inf
            return None if is_weight else f"the weight is {value}, expected a finite number of 0 or more"
        if value == "":
            return f"the {role} is empty"
        if not self.limits or role == TIME:
            return None
        # isdigit alone accepts digits of other scripts, which Arrow's integers do not.
        digits = value[1:] if value.startswith("-") else value
        if not (digits.isascii() and digits.isdigit()):
            return f"the {role} is {value!r}, expected an integer id"
        # Python refuses to convert more than 4,300 digits.
        number = int(value) if len(digits.lstrip("0")) <= MAX_ID_DIGITS else None
        if number is not None and 0 <= number < self.limits[role]:
            return None
        fault = f"the {role} id is {value}, allowed is 0 to {self.limits[role] - 1}"
        if role == "relation" and number is not None and 0 <= number < self.limits["head"]:
            fault += "; it could be an entity's: see --columns for the order of the columns"
        return fault
