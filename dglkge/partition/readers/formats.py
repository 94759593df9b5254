"""Input formats: names, extensions, and the format of a file by its name or else its content."""

from __future__ import annotations

import bz2
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from dglkge.data.text_format import codec, extension
from dglkge.errors import InputError, unknown_name

TABLE, RDF, GRAPHML, FOLDER = "table", "rdf", "graphml", "folder"
"""Families of formats: files of one family go together."""

READ_ERRORS = (OSError, EOFError, zlib.error)
"""Errors of a file that cannot be read or is damaged in its compression."""

_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True)
class Format:
    """An input format.

    Attributes
    ----------
    name : str
        Value of ``--format``.
    title : str
        Name for people.
    family : str
        ``"table"``, ``"rdf"``, ``"graphml"`` or ``"folder"``.
    extensions : tuple of str
        Extensions of file names, without that of a compression.
    """

    name: str
    title: str
    family: str
    extensions: tuple[str, ...] = ()


FORMATS = {
    entry.name: entry
    for entry in (
        Format("tsv", "tab-separated text", TABLE, (".tsv", ".txt")),
        Format("csv", "CSV", TABLE, (".csv",)),
        Format("parquet", "Parquet", TABLE, (".parquet",)),
        Format("ntriples", "N-Triples", RDF, (".nt", ".ntriples")),
        Format("nquads", "N-Quads", RDF, (".nq", ".nquads")),
        Format("turtle", "Turtle", RDF, (".ttl", ".turtle")),
        Format("trig", "TriG", RDF, (".trig",)),
        Format("graphml", "GraphML", GRAPHML, (".graphml",)),
        Format("dglke", "a DGL-KE data set", FOLDER),
        Format("openke", "an OpenKE data set", FOLDER),
        Format("pykeen", "PyKEEN triples factories", FOLDER),
    )
}
_BY_EXTENSION = {extension: entry for entry in FORMATS.values() for extension in entry.extensions}


def format_named(name: str) -> Format:
    """Return the format with a name.

    Raises
    ------
    InputError
        If there is none.
    """
    if name not in FORMATS:
        raise unknown_name("format", name, FORMATS)
    return FORMATS[name]


def bare_name(path: Path) -> str:
    """Return a file's name without the extension of a compression."""
    return path.stem if codec(path) else path.name


def format_by_name(path: Path) -> Format | None:
    """Return the format that the extension of a file stands for, or None."""
    return _BY_EXTENSION.get(extension(path))


def compression(path: Path) -> str | None:
    """Return ``"gzip"`` or ``"bzip2"`` by the first bytes of a file, or None."""
    with open(path, "rb") as file:
        return _compression_of(file.read(3))


def _compression_of(start: bytes) -> str | None:
    if start.startswith(b"\x1f\x8b"):
        return "gzip"
    return "bzip2" if start.startswith(b"BZh") else None


@contextmanager
def open_stream(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file for reading, uncompressed by its content.

    Yields
    ------
    raw : binary file
        The file as it is; its position tells progress.
    stream : binary file
        The uncompressed bytes.
    """
    with open(path, "rb") as raw:
        start = raw.read(3)
        raw.seek(0)
        kind = _compression_of(start)
        if kind == "gzip":
            yield raw, cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        elif kind == "bzip2":
            yield raw, cast(BinaryIO, bz2.BZ2File(raw))
        else:
            yield raw, raw


def find_format(path: Path) -> tuple[Format, str]:
    """Find out the format of a file.

    Returns
    -------
    format : Format
    how : str
        ``"name"`` or ``"content"``.

    Raises
    ------
    InputError
        If the file cannot be read, or neither its name nor its content tells.
    """
    named = format_by_name(path)
    if named is not None:
        return named, "name"
    found = format_by_content(path)
    if found is None:
        known = ", ".join(sorted(_BY_EXTENSION))
        raise InputError(
            f"{path}: unknown kind of file, by its name and by its content; known extensions are {known}, "
            "most also with .gz or .bz2; --format names the format"
        )
    return found, "content"


def format_by_content(path: Path) -> Format | None:
    """Return the format that the first bytes of a file look like, or None.

    Raises
    ------
    InputError
        If the file is empty or cannot be read.
    """
    try:
        with open_stream(path) as (_, stream):
            sample = stream.read(_SAMPLE_BYTES)
    except READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if not sample:
        raise InputError(f"{path}: the file is empty")
    if sample.startswith(b"PAR1"):
        return FORMATS["parquet"]
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


def text_lines(stream: BinaryIO) -> Iterator[str]:
    """Yield the lines of a UTF-8 stream without their ends, for files that are small."""
    for line in io.TextIOWrapper(stream, encoding="utf-8-sig", newline="\n"):
        yield line.rstrip("\r\n")
