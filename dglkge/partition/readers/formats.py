"""Input formats: names, extensions, and the format of a file by its name or else its content."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dglkge.data.text_format import extension, open_stream, read_errors
from dglkge.errors import InputError

TABLE, RDF, GRAPHML, FOLDER = "table", "rdf", "graphml", "folder"
"""Families of formats: files of one family go together."""

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


def format_by_name(path: Path) -> Format | None:
    """Return the format that the extension of a file stands for, or None."""
    return _BY_EXTENSION.get(extension(path))


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
    with read_errors(path), open_stream(path) as (_, stream):
        sample = stream.read(_SAMPLE_BYTES)
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
