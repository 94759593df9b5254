"""Options of a data set: of its partitions, of reading its input; formats, and how a file's is found."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from dglkge.data.text_format import Columns, extension, open_stream, read_errors
from dglkge.data.vocabulary import GRANULARITIES
from dglkge.errors import InputError, require_known, unknown_name

DATASET_FOLDER = "dataset"
"""In a run's folder: the data set of triples that were given instead of a data set."""

METHODS = ("metis", "ldg", "random")

IMPLIED = "implied"
DROPPED_LEAKS = ("exact", IMPLIED)
"""Values of ``--drop-leaks``."""

AUTO_SPLIT: Literal["auto"] = "auto"
DEFAULT_SPLIT = (0.9, 0.05, 0.05)
"""Shares of train, valid and test where there is one set of triples and nothing is said."""

MIN_MEMORY = 64 * 10**6
"""Least value of ``--max-memory``: pieces of triples take tens of MB however few are read at a time."""

LITERALS = ("drop", "entities", "numeric")
DEFAULT_GRAPH = "default"
"""Value of ``--graph`` for the triples that are in no named graph."""

_PREFIX_NAME = re.compile(r"[^\W\d_][\w.-]*|")
_IRI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>\"{}|\\^`]*")


Family = Literal["table", "rdf", "graphml", "folder", "dgl"]
"""Families of formats: files of one family go together."""


@dataclass(frozen=True)
class Format:
    """An input format: value of ``--format``, name for people, family, extensions without a compression's."""

    name: str
    title: str
    family: Family
    extensions: tuple[str, ...] = ()


_FORMATS = (
    Format("tsv", "tab-separated text", "table", (".tsv", ".txt")),
    Format("csv", "CSV", "table", (".csv",)),
    Format("parquet", "Parquet", "table", (".parquet",)),
    Format("ntriples", "N-Triples", "rdf", (".nt", ".ntriples")),
    Format("nquads", "N-Quads", "rdf", (".nq", ".nquads")),
    Format("turtle", "Turtle", "rdf", (".ttl", ".turtle")),
    Format("trig", "TriG", "rdf", (".trig",)),
    Format("graphml", "GraphML", "graphml", (".graphml",)),
    Format("dgl", "a graph of DGL", "dgl", (".bin",)),
    Format("dglke", "a DGL-KE data set", "folder"),
    Format("openke", "an OpenKE data set", "folder"),
    Format("pykeen", "PyKEEN triples factories", "folder"),
    Format("ogb", "an OGB data set", "folder"),
)
FORMATS = {entry.name: entry for entry in _FORMATS}


@dataclass(frozen=True)
class ReadingOptions:
    """Options of reading files and folders of triples.

    Attributes
    ----------
    format : str, optional
        Name of the input's format; by default it is found out.
    prefixes : mapping of str to str
        IRI of each prefix, before those of the files and the well-known ones.
    full_iris : bool
        Whether IRIs stay as they are.
    base_iri : str, optional
        What relative IRIs are relative to.
    literals : str
        ``"drop"``, ``"entities"``, or ``"numeric"`` for a side file of numbers.
    graphs : tuple of str
        Named graphs to read, as IRI, or ``"default"``. Empty: all.
    types_from : str, optional
        Relation whose triples give the entity types; with GraphML, an attribute of the nodes.
    max_types : int
        Number of entity types made of it, besides ``untyped``.
    relation_attribute, name_attribute : str, optional
        Attributes of GraphML's edges and nodes.
    """

    format: str | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)
    full_iris: bool = False
    base_iri: str | None = None
    literals: str = "drop"
    graphs: tuple[str, ...] = ()
    types_from: str | None = None
    max_types: int = 20
    relation_attribute: str | None = None
    name_attribute: str | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ReadingOptions:
        """Build the options from a user's mapping."""
        known = [option.name for option in fields(cls)]
        for name in values:
            require_known("reading option", name, known)
        graphs = values.get("graphs", ())
        return cls(**{**values, "graphs": (graphs,) if isinstance(graphs, str) else tuple(graphs)})


@dataclass(frozen=True)
class Options:
    """Options of a data set and its partitions; a value that is not allowed, or no file, is an InputError.

    Attributes
    ----------
    method : str
        ``"metis"``, ``"ldg"`` or ``"random"``.
    seed : int
        Of ``ldg`` and ``random``, of the relations' owners, of a split by fractions. METIS itself takes none.
    columns : Columns
        Where the parts of a triple stand.
    entity_types : Path, optional
        File of entity and type.
    integer_ids : bool
        Whether the triples are of integers from 0 instead of names.
    entity_map, relation_map : Path, optional
        Files of integer id and name.
    split : (float, float, float) or "auto", optional
        Fractions of train, valid and test to split one set of triples into; ``"auto"``:
        :data:`DEFAULT_SPLIT` if there is one set. By default nothing is split.
    overwrite : bool
        Whether to replace an existing data set.
    name : str, optional
        Name of the dataset; by default the output folder's.
    progress : bool, optional
        Whether to show progress on stderr; by default where that is a terminal.
    strict_splits : float, optional
        Refuse triples of valid and test that stand in train, and more than this share that train implies.
    drop_leaks : str, optional
        Leave out triples of valid and test that stand in train (``"exact"``), or also those that train
        implies (``"implied"``).
    max_memory : int, optional
        Bytes that the triples may take in memory; names of entities and node ids come on top. By default as
        much as is free for METIS, and 512 MiB for anything else.
    num_workers : int, optional
        Threads that read and check triples; by default one for each core.
    time_granularity : str, optional
        ``"day"``, ``"month"`` or ``"year"``: dates of the time column are cut to it.
    delimiter : str, optional
        Instead of the comma of CSV and the tab of other text files.
    """

    num_parts: int = 1
    method: str = "metis"
    seed: int = 0
    columns: Columns = Columns()
    entity_types: Path | None = None
    integer_ids: bool = False
    entity_map: Path | None = None
    relation_map: Path | None = None
    split: tuple[float, float, float] | Literal["auto"] | None = None
    overwrite: bool = False
    name: str | None = None
    progress: bool | None = None
    reading: ReadingOptions = ReadingOptions()
    strict_splits: float | None = None
    drop_leaks: str | None = None
    max_memory: int | None = None
    num_workers: int | None = None
    time_granularity: str | None = None
    delimiter: str | None = None

    def __post_init__(self) -> None:
        reading = self.reading
        for noun, value, allowed in (
            ("partition method", self.method, METHODS),
            ("kind of leaks to drop", self.drop_leaks, (None, *DROPPED_LEAKS)),
            ("policy for literals", reading.literals, LITERALS),
            ("format", reading.format, (None, *FORMATS)),
            ("granularity of times", self.time_granularity, (None, *GRANULARITIES)),
        ):
            if value not in allowed:
                raise unknown_name(noun, str(value), [name for name in allowed if name is not None])
        for option, number, least, most, expected in (
            ("the number of partitions", self.num_parts, 1, math.inf, "1 or more"),
            ("the seed", self.seed, 0, 2**63 - 1, "0 to 2**63 - 1"),
            ("--strict-splits", self.strict_splits, 0, 1, "a share from 0 to 1"),
            ("--max-memory", self.max_memory, MIN_MEMORY, math.inf, f"{MIN_MEMORY} bytes (64MB) or more"),
            ("--num-workers", self.num_workers, 1, math.inf, "1 or more"),
            ("max_types", reading.max_types, 1, math.inf, "1 or more"),
        ):
            if number is not None and not least <= number <= most:
                raise InputError(f"{option} is {number}, expected {expected}")
        if (self.entity_map or self.relation_map) and not self.integer_ids:
            raise InputError("an entity or relation map was given, but the ids are not said to be integers")
        if self.entity_types is not None and reading.types_from is not None:
            raise InputError("entity types come from --entity-types or from --types-from: give one of them")
        for name in reading.prefixes:
            if not _PREFIX_NAME.fullmatch(name):
                raise InputError(f"the prefix {name!r} is not allowed: a letter, then letters, digits, . _ -")
        iris = {f"the IRI of prefix {name!r}": iri for name, iri in reading.prefixes.items()}
        for option, iri in {**iris, "the base IRI": reading.base_iri}.items():
            if iri is not None and not _IRI.fullmatch(iri):
                raise InputError(f"{option} is {iri!r}, expected an absolute IRI such as http://example.org/")
        for path in (self.entity_types, self.entity_map, self.relation_map):
            if path is not None and not path.is_file():
                raise InputError(f"{path}: there is no such file")


def parse_fractions(text: str) -> tuple[float, float, float]:
    """Parse the ``--split`` option: three fractions, or the one of train (the rest is halved)."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        rest = (1 - numbers[0]) / 2
        numbers = [numbers[0], rest, rest]
    if len(numbers) != 3 or not all(0 <= x <= 1 for x in numbers) or numbers[0] == 0:
        raise InputError(f"--split {text!r} is not allowed; give one or three fractions, e.g. 0.9,0.05,0.05")
    # Decimal fractions such as 0.9 + 0.05 + 0.05 are not exact in binary.
    if not math.isclose(sum(numbers), 1, abs_tol=1e-6):
        raise InputError(f"--split {text!r}: the fractions add up to {sum(numbers):g}, not 1")
    return numbers[0], numbers[1], numbers[2]


def parse_prefixes(texts: list[str]) -> dict[str, str]:
    """Parse the ``--prefix`` options, such as ``ex=http://example.org/``."""
    prefixes: dict[str, str] = {}
    for text in texts:
        name, equals, iri = text.partition("=")
        if not equals:
            raise InputError(f"--prefix {text!r} is not allowed; give name=IRI, e.g. ex=http://example.org/")
        name = name.removesuffix(":")  # people write "ex:", as in Turtle
        if prefixes.setdefault(name, iri) != iri:
            raise InputError(f"--prefix {name!r} is given twice: {prefixes[name]} and {iri}")
    return prefixes


Files = Mapping[str, Sequence[tuple[Path, Format]]]
"""Files of each split, with their formats."""

_SAMPLE_BYTES = 1 << 16
_BY_EXTENSION = {extension: entry for entry in FORMATS.values() for extension in entry.extensions}
_FIRST_BYTES = {b"PAR1": "parquet", struct.pack("<Q", 0xDD2E4FF046B4A13F): "dgl"}
"""Of files of Parquet and of ``dgl.save_graphs``."""


def format_by_name(path: Path) -> Format | None:
    """Return the format that the extension of a file stands for, or None."""
    return _BY_EXTENSION.get(extension(path))


def find_format(path: Path) -> tuple[Format, str]:
    """Find out the format of a file, by its ``"name"`` or its ``"content"``; neither is an InputError."""
    if named := format_by_name(path):
        return named, "name"
    if looks_like := format_by_content(path):
        return looks_like, "content"
    known = f"known extensions are {', '.join(sorted(_BY_EXTENSION))}, most also with .gz or .bz2"
    fault = f"{path}: unknown kind of file, by its name and by its content"
    raise InputError(f"{fault}; {known}; --format names the format")


def format_by_content(path: Path) -> Format | None:
    """Return the format that the first bytes of a file look like, or None; an empty one is an InputError."""
    with read_errors(path), open_stream(path) as (_, stream):
        sample = stream.read(_SAMPLE_BYTES)
    if not sample:
        raise InputError(f"{path}: the file is empty")
    name = next((name for start, name in _FIRST_BYTES.items() if sample.startswith(start)), None)
    return FORMATS.get(name or _text_format_of(sample.decode("utf-8-sig", errors="replace")))


_TERM = r"(?:<[^<>\s]*>|_:\S+)"
_STATEMENT = re.compile(rf"{_TERM}[ \t]*<[^<>\s]*>[ \t]*.*\.[ \t]*(?:#.*)?")
_IN_A_GRAPH = re.compile(rf"(?:{_TERM}|\"[^ \t]*)[ \t]+{_TERM}[ \t]*\.[ \t]*(?:#.*)?")
_DIRECTIVE = re.compile(r"@?(?:prefix|base)\s", re.IGNORECASE)
_NOT_SYNTAX = re.compile(r'"""(?:.|\n)*?"""|"(?:\\.|[^"\\\n])*"|<[^<>\s]*>|#.*')
_XML_ROOT = re.compile(r"<(?:\w+:)?graphml[\s>]")


def _text_format_of(text: str) -> str:
    """Return the name of the format that the start of a text looks like; empty for none."""
    if text.lstrip().startswith("<") and _XML_ROOT.search(text):
        return "graphml"
    # Comments and empty lines stand before the first statement of many files.
    lines = [line for line in map(str.strip, text.split("\n")) if line and not line.startswith("#")]
    first = lines[0] if lines else ""
    # The first line alone may be a statement of Turtle; the sample's last line may be cut off.
    if lines and all(_STATEMENT.fullmatch(line) for line in lines[: max(len(lines) - 1, 1)]):
        return "nquads" if _is_quad(first) else "ntriples"
    if _STATEMENT.fullmatch(first) or _DIRECTIVE.match(first):
        # TriG puts the triples of a graph in braces, which Turtle has in literals and comments only.
        return "trig" if "{" in _NOT_SYNTAX.sub("", text) else "turtle"
    if first.count("\t") >= 2:
        return "tsv"
    return "csv" if first.count(",") >= 2 and first[0] not in "{[<" else ""


def _is_quad(line: str) -> bool:
    """Return whether the line of a statement has a fourth term."""
    # Behind subject and predicate; a literal may have anything inside its quotes.
    rest = re.sub(rf"^{_TERM}[ \t]*<[^<>\s]*>[ \t]*", "", line)
    rest = re.sub(r'^"(?:\\.|[^"\\])*"', '""', rest)
    return _IN_A_GRAPH.fullmatch(rest) is not None
