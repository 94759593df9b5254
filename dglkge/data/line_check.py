"""Finds the first bad line of a file, plainly, line by line.

The fast reader works on blocks and knows no line numbers; once it has met something bad, this reads the file
again, only to tell the user where.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from dglkge.data.columns import WEIGHT
from dglkge.data.text_format import TextFormat


@dataclass(frozen=True)
class RowRules:
    """What a row of triples must be.

    Attributes
    ----------
    limits : mapping of str to int
        With integer ids, for each of head, relation and tail the id that is just too large. Empty: the
        fields are names.
    """

    limits: dict[str, int] = field(default_factory=dict)

    @property
    def integer_ids(self) -> bool:
        """Whether head, relation and tail are integers."""
        return bool(self.limits)

    def fault(self, role: str, value: str) -> str | None:
        """Return what is wrong with one field, or None."""
        if role == WEIGHT:
            return _weight_fault(value)
        if value == "":
            return f"the {role} is empty"
        if not self.limits:
            return None
        digits = value[1:] if value.startswith("-") else value
        if not (digits.isascii() and digits.isdigit()):
            return f"the {role} is {value!r}, expected an integer id"
        if not 0 <= int(value) < self.limits[role]:
            return f"the {role} id is {value}, allowed is 0 to {self.limits[role] - 1}"
        return None


def _weight_fault(value: str) -> str | None:
    try:
        weight = float(value)
    except ValueError:
        return f"the weight is {value!r}, expected a number"
    if not math.isfinite(weight) or weight < 0:
        return f"the weight is {value}, expected a finite number that is not negative"
    return None


def first_bad_line(
    lines: Iterable[bytes],
    text: TextFormat,
    places: dict[str, int],
    num_fields: int,
    has_header: bool,
    rules: RowRules,
) -> tuple[int, str] | None:
    """Return the number of the first bad line, from 1, and what is wrong with it.

    Parameters
    ----------
    lines : iterable of bytes
        The lines of the file.
    text : TextFormat
        How a line is split.
    places : dict of str to int
        Index of each role's field.
    num_fields : int
        How many fields each line must have.
    has_header : bool
        Whether the first line holds no triple.
    rules : RowRules
        What the fields must be.

    Returns
    -------
    (int, str) or None
        None if every line is good.
    """
    for number, raw in enumerate(lines, start=1):
        content = raw.rstrip(b"\n")
        content = content[:-1] if content.endswith(b"\r") else content
        if content == b"" or (has_header and number == 1):
            continue
        try:
            line = content.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            return number, f"byte {error.start + 1} of the line is not UTF-8"
        fault = _line_fault(line, text, places, num_fields, rules)
        if fault:
            return number, fault
    return None


def _line_fault(
    line: str, text: TextFormat, places: dict[str, int], num_fields: int, rules: RowRules
) -> str | None:
    if "\r" in line:
        return "there is a carriage return inside the line"
    try:
        fields = text.split(line)
    except ValueError as error:
        return str(error)
    if len(fields) != num_fields:
        separator = {"\t": "tabs", ",": "commas"}.get(text.delimiter, repr(text.delimiter))
        hint = "; see --delimiter" if len(fields) == 1 else ""
        got = f"got {len(fields)} columns separated by {separator}"
        return f"{got}, expected {num_fields}: {line[:80]!r}{hint}"
    faults = (rules.fault(role, fields[place]) for role, place in places.items())
    return next((fault for fault in faults if fault), None)
