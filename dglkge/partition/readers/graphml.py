"""Reads the edges of a GraphML file as triples, with the attributes of edges and nodes as names and types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree.ElementTree import Element
from xml.parsers import expat

from dglkge.data.text_format import open_stream, read_errors
from dglkge.errors import InputError
from dglkge.partition.ingest import Reading, Watch, ingest, name_chunks, renamed
from dglkge.partition.options import Files, Format, ReadingOptions

RELATION_ATTRIBUTES = ("relation", "predicate", "label", "labelE", "type")
"""Attributes of edges that are taken as the relation; the first one that the file declares."""

NO_RELATION = "edge"
"""Relation of all edges of a file without such an attribute."""

TYPE_RELATION = "\0type"
"""Relation of the triples that stand for the types of nodes; no name in XML has this character."""

_BLOCK_BYTES = 1 << 18
_NEEDED = {"key": ("id",), "data": ("key",), "node": ("id",), "edge": ("source", "target")}
_TEXTS = ("data", "default")


def read_graphml(files: Files, options: ReadingOptions, watch: Watch) -> Reading:
    """Read GraphML files; the same node in two files has the same id."""
    counts = _Counts()
    rows = {split: _rows(paths, options, watch, counts) for split, paths in files.items()}
    triples = ingest({split: name_chunks(split_rows) for split, split_rows in rows.items()})
    entities = list(triples.entities)
    if options.name_attribute is not None:
        entities = [counts.names.get(node, node) for node in entities]
        nodes: dict[str, str] = {}
        for name, node in zip(entities, triples.entities):
            if nodes.setdefault(name, node) != node:
                pair = f"{nodes[name]!r} and {node!r}"
                raise InputError(f"the nodes {pair} have the same {options.name_attribute!r}: {name!r}")
    figures = {"nodes": counts.nodes, "edges": counts.edges, "relation_attribute": counts.relation}
    notes = [f"edges have no relation: all are called {NO_RELATION!r} (see --relation-attribute)"]
    if counts.relation:
        notes = [f"the relation is the edges' attribute {counts.relation!r}"]
    if counts.undirected:
        notes.append(f"{counts.undirected:,} undirected edges: one triple each, from source to target")
    return Reading(renamed(triples, entities, triples.relations), figures=figures, notes=notes)


@dataclass
class _Counts:
    """Counts over all files, and the names of nodes."""

    nodes: int = 0
    edges: int = 0
    undirected: int = 0
    relation: str | None = None
    names: dict[str, str] = field(default_factory=dict)


def _rows(
    files: Sequence[tuple[Path, Format]], options: ReadingOptions, watch: Watch, counts: _Counts
) -> Iterator[tuple[str, str, str]]:
    for path, _ in files:
        before, parser, is_last = counts.edges, _Parser(path, options, counts), False
        with read_errors(path), open_stream(path) as (raw, stream):
            while not is_last:
                block = stream.read(_BLOCK_BYTES)
                is_last = not block
                yield from parser.rows_of(block, is_last)
                watch(path, raw.tell())
        if counts.edges == before:
            raise InputError(f"{path}: the file is empty: it has no edges")


class _Parser:
    """Turns XML events into rows of head, relation and tail."""

    def __init__(self, path: Path, options: ReadingOptions, counts: _Counts) -> None:
        self._path, self._options, self._counts = path, options, counts
        self._rows: list[tuple[str, str, str]] = []
        # Id and default of each declared attribute, of nodes and of edges.
        self._keys: dict[str, dict[str, tuple[str, str | None]]] = {"node": {}, "edge": {}}
        self._declared: str | None = None
        # The open elements, innermost last; they have only children data and default.
        self._open: list[Element] = []
        self._xml = expat.ParserCreate()
        self._xml.buffer_text = True
        self._xml.StartElementHandler, self._xml.EndElementHandler = self._start, self._end
        self._xml.CharacterDataHandler = self._characters

    def rows_of(self, block: bytes, is_last: bool) -> list[tuple[str, str, str]]:
        """Parse the next bytes, and return the rows that they complete."""
        self._rows = []
        try:
            self._xml.Parse(block, is_last)
        except expat.ExpatError as error:
            place = f"{self._path}:{error.lineno}: column {error.offset + 1}"
            raise InputError(f"{place}: {expat.errors.messages[error.code]} (read as GraphML)") from error
        return self._rows

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        tag = name.rpartition(":")[2]
        if not self._open and tag != "graphml":
            raise self._error(f"the first element is <{tag}>, expected <graphml> (read as GraphML)")
        for needed in _NEEDED.get(tag, ()):
            if not attributes.get(needed):
                raise self._error(f"the <{tag}> has no {needed!r}")
        # Elements inside data are part of its text.
        is_text = bool(self._open) and self._open[-1].tag in _TEXTS
        self._open.append(self._open[-1] if is_text else Element(tag, attributes))

    def _characters(self, text: str) -> None:
        element = self._open[-1]
        if element.tag in _TEXTS:
            element.text = (element.text or "") + text

    def _end(self, name: str) -> None:
        element = self._open.pop()
        if element.tag in _TEXTS:
            if self._open[-1] is not element:
                self._open[-1].append(element)
        elif element.tag == "key":
            id_, default = element.attrib["id"], element.find("default")
            value = None if default is None else (default.text or "").strip()
            for domain, keys in self._keys.items():
                if element.get("for", "all") in (domain, "all"):
                    keys.setdefault(element.get("attr.name", id_), (id_, value))
            self._declared = next((name for name in RELATION_ATTRIBUTES if name in self._keys["edge"]), None)
        elif element.tag in ("node", "edge"):
            values = {data.get("key", ""): (data.text or "").strip() for data in element}
            if element.tag == "node":
                self._node(element.attrib["id"], values)
            else:
                self._edge(element.attrib, values)

    def _node(self, node: str, values: dict[str, str]) -> None:
        self._counts.nodes += 1
        if type_ := self._value("node", self._options.types_from, values):
            self._rows.append((node, TYPE_RELATION, type_))
        if self._options.name_attribute is not None:
            self._require("node", self._options.name_attribute)
        if name := self._value("node", self._options.name_attribute, values):
            self._counts.names[node] = name

    def _edge(self, attributes: dict[str, str], values: dict[str, str]) -> None:
        self._counts.edges += 1
        by_default = "false" if self._open[-1].get("edgedefault") == "undirected" else "true"
        self._counts.undirected += attributes.get("directed", by_default) != "true"
        source, target = attributes["source"], attributes["target"]
        name = self._options.relation_attribute or self._declared
        self._counts.relation = name or self._counts.relation
        if name is None:
            relation: str | None = NO_RELATION
        elif name == "id" and name not in self._keys["edge"]:
            # NetworkX writes the key of a multigraph's edge as its id.
            relation = attributes.get("id")
        else:
            self._require("edge", name)
            relation = self._value("edge", name, values)
        if not relation:
            raise self._error(f"the edge from {source!r} to {target!r} has no {name!r}, its relation")
        self._rows.append((source, relation, target))

    def _value(self, domain: str, name: str | None, values: dict[str, str]) -> str | None:
        id_, default = self._keys[domain].get(name or "", ("", None))
        return values.get(id_, default)

    def _require(self, domain: str, name: str) -> None:
        """Raise InputError if an attribute is not declared."""
        if name not in self._keys[domain]:
            known = ", ".join(sorted(self._keys[domain])) or "none"
            raise self._error(f"no attribute {name!r} of {domain}s is declared; the file has {known}")

    def _error(self, message: str) -> InputError:
        return InputError(f"{self._path}:{self._xml.CurrentLineNumber}: {message}")
