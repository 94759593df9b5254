"""Finds the format of a file by its name, or else by its first bytes."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from dglkge.data.text_format import extension, open_stream, read_errors
from dglkge.errors import InputError
from dglkge.partition.options import FORMATS, Format

_SAMPLE_BYTES = 1 << 16
_BY_EXTENSION = {extension: entry for entry in FORMATS.values() for extension in entry.extensions}
_PARQUET_MAGIC = b"PAR1"
_DGL_MAGIC = struct.pack("<Q", 0xDD2E4FF046B4A13F)
"""First bytes of a file of ``dgl.save_graphs``."""


def format_by_name(path: Path) -> Format | None:
    """Return the format that the extension of a file stands for, or None."""
    return _BY_EXTENSION.get(extension(path))


def find_format(path: Path) -> tuple[Format, str]:
    """Find out the format of a file, by its ``"name"`` or its ``"content"``; neither is an InputError."""
    named = format_by_name(path)
    if named is not None:
        return named, "name"
    format_ = format_by_content(path)
    if format_ is None:
        known = ", ".join(sorted(_BY_EXTENSION))
        raise InputError(
            f"{path}: unknown kind of file, by its name and by its content; known extensions are {known}, "
            "most also with .gz or .bz2; --format names the format"
        )
    return format_, "content"


def format_by_content(path: Path) -> Format | None:
    """Return the format that the first bytes of a file look like, or None; an empty one is an InputError."""
    with read_errors(path), open_stream(path) as (_, stream):
        sample = stream.read(_SAMPLE_BYTES)
    if not sample:
        raise InputError(f"{path}: the file is empty")
    if sample.startswith(_PARQUET_MAGIC):
        return FORMATS["parquet"]
    if sample.startswith(_DGL_MAGIC):
        return FORMATS["dgl"]
    name = _text_format_of(sample.decode("utf-8-sig", errors="replace"))
    return None if name is None else FORMATS[name]


_TERM = r"(?:<[^<>\s]*>|_:\S+)"
_STATEMENT = re.compile(rf"{_TERM}[ \t]*<[^<>\s]*>[ \t]*.*\.[ \t]*(?:#.*)?")
_IN_A_GRAPH = re.compile(rf"(?:{_TERM}|\"[^ \t]*)[ \t]+{_TERM}[ \t]*\.[ \t]*(?:#.*)?")
_DIRECTIVE = re.compile(r"@?(?:prefix|base)\s", re.IGNORECASE)
_NOT_SYNTAX = re.compile(r'"""(?:.|\n)*?"""|"(?:\\.|[^"\\\n])*"|<[^<>\s]*>|#.*')
_XML_ROOT = re.compile(r"<(?:\w+:)?graphml[\s>]")


def _text_format_of(text: str) -> str | None:
    if text.lstrip().startswith("<") and _XML_ROOT.search(text):
        return "graphml"
    # Comments and empty lines stand before the first statement of many files.
    lines = [line for line in map(str.strip, text.split("\n")) if line and not line.startswith("#")]
    if not lines:
        return None
    first = lines[0]
    if _STATEMENT.fullmatch(first):
        # The first line alone may be a statement of Turtle; the sample's last line may be cut off.
        if all(_STATEMENT.fullmatch(line) for line in lines[: max(len(lines) - 1, 1)]):
            return "nquads" if _is_quad(first) else "ntriples"
        return _turtle_or_trig(text)
    if _DIRECTIVE.match(first):
        return _turtle_or_trig(text)
    if first.count("\t") >= 2:
        return "tsv"
    return "csv" if first.count(",") >= 2 and first[0] not in "{[<" else None


def _is_quad(line: str) -> bool:
    """Return whether the line of a statement has a fourth term."""
    # Behind subject and predicate; a literal may have anything inside its quotes.
    rest = re.sub(rf"^{_TERM}[ \t]*<[^<>\s]*>[ \t]*", "", line)
    rest = re.sub(r'^"(?:\\.|[^"\\])*"', '""', rest)
    return _IN_A_GRAPH.fullmatch(rest) is not None


def _turtle_or_trig(text: str) -> str:
    # TriG puts the triples of a graph in braces, which Turtle has in literals and comments only.
    return "trig" if "{" in _NOT_SYNTAX.sub("", text) else "turtle"
