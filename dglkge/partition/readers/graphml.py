"""Reads the edges of a GraphML file as triples, with the attributes of edges and nodes as names and types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.parsers import expat

from dglkge.data.text_format import open_stream, read_errors
from dglkge.errors import InputError
from dglkge.partition.ingest import CHUNK_ROWS, Reading, Watch, ingest, name_chunk, renamed
from dglkge.partition.options import Format, ReadingOptions

RELATION_ATTRIBUTES = ("relation", "predicate", "label", "labelE", "type")
"""Attributes of edges that are taken as the relation; the first one that the file declares."""

NO_RELATION = "edge"
"""Relation of all edges of a file without such an attribute."""

TYPE_RELATION = "\0type"
"""Relation of the triples that stand for the types of nodes; no name in XML has this character."""

_BLOCK_BYTES = 1 << 18


def read_graphml(
    files: Mapping[str, Sequence[tuple[Path, Format]]], options: ReadingOptions, watch: Watch
) -> Reading:
    """Read GraphML files; the same node in two files has the same id.

    Raises
    ------
    InputError
        If a file cannot be read, is no GraphML, or an edge lacks its relation.
    """
    counts = _Counts()
    triples = ingest({split: _split_chunks(paths, options, watch, counts) for split, paths in files.items()})
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


def _split_chunks(
    files: Sequence[tuple[Path, Format]], options: ReadingOptions, watch: Watch, counts: _Counts
) -> Iterator[Mapping[str, Any]]:
    for path, _ in files:
        before = counts.edges
        parser = _Parser(path, options, counts)
        on_bytes = watch(path)
        with read_errors(path), open_stream(path) as (raw, stream):
            while block := stream.read(_BLOCK_BYTES):
                parser.feed(block, is_last=False)
                on_bytes(raw.tell())
                if len(parser.rows[0]) >= CHUNK_ROWS:
                    yield parser.take()
            parser.feed(b"", is_last=True)
        if parser.rows[0]:
            yield parser.take()
        if counts.edges == before:
            raise InputError(f"{path}: the file is empty: it has no edges")


@dataclass
class _Key:
    """A declared attribute: of what, its name, its value where none is given."""

    domain: str
    name: str
    default: str | None = None


class _Parser:
    """Turns XML events into rows of head, relation and tail."""

    def __init__(self, path: Path, options: ReadingOptions, counts: _Counts) -> None:
        self.rows: tuple[list[str], list[str], list[str]] = ([], [], [])
        self._path = path
        self._options = options
        self._counts = counts
        self._keys: dict[str, _Key] = {}
        self._relation_keys: list[str] | None = None
        self._is_directed = [True]
        self._depth = 0
        # The open elements node and edge, innermost last: XML attributes, and values by key.
        self._open: list[tuple[str, dict[str, str], dict[str, str]]] = []
        self._key: str | None = None
        self._text: list[str] | None = None
        self._xml = expat.ParserCreate()
        self._xml.buffer_text = True
        self._xml.StartElementHandler = self._start
        self._xml.EndElementHandler = self._end
        self._xml.CharacterDataHandler = self._characters

    def feed(self, block: bytes, is_last: bool) -> None:
        """Parse the next bytes."""
        try:
            self._xml.Parse(block, is_last)
        except expat.ExpatError as error:
            reason = expat.errors.messages[error.code]
            raise InputError(
                f"{self._path}:{error.lineno}: column {error.offset + 1}: {reason} (read as GraphML)"
            ) from error

    def take(self) -> Mapping[str, Any]:
        """Return the rows so far as a chunk."""
        chunk = name_chunk(self.rows)
        for column in self.rows:
            column.clear()
        return chunk

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        element = name.rpartition(":")[2]
        self._depth += 1
        if self._depth == 1 and element != "graphml":
            raise self._error(f"the first element is <{name}>, expected <graphml> (read as GraphML)")
        if element == "key":
            self._key = self._required(element, attributes, "id")
            attribute = attributes.get("attr.name", self._key)
            self._keys[self._key] = _Key(attributes.get("for", "all"), attribute)
            self._relation_keys = None
        elif element in ("default", "data"):
            self._text = []
            if element == "data":
                self._key = self._required(element, attributes, "key")
        elif element == "graph":
            self._is_directed.append(attributes.get("edgedefault") != "undirected")
        elif element in ("node", "edge"):
            for needed in ("id",) if element == "node" else ("source", "target"):
                self._required(element, attributes, needed)
            self._open.append((element, attributes, {}))

    def _characters(self, text: str) -> None:
        if self._text is not None:
            self._text.append(text)

    def _end(self, name: str) -> None:
        element = name.rpartition(":")[2]
        self._depth -= 1
        if element in ("default", "data"):
            value = "".join(self._text or []).strip()
            self._text = None
            if element == "default" and self._key in self._keys:
                self._keys[self._key].default = value
            elif element == "data" and self._open and self._key is not None:
                self._open[-1][2][self._key] = value
        elif element == "graph":
            self._is_directed.pop()
        elif element in ("node", "edge"):
            _, attributes, values = self._open.pop()
            if element == "node":
                self._node(attributes["id"], values)
            else:
                self._edge(attributes, values)

    def _node(self, node: str, values: dict[str, str]) -> None:
        self._counts.nodes += 1
        if self._options.types_from is not None:
            type_ = self._value("node", self._options.types_from, values)
            if type_:
                self._add(node, TYPE_RELATION, type_)
        if self._options.name_attribute is not None:
            name = self._value("node", self._options.name_attribute, values)
            if name is None and not self._declared("node", self._options.name_attribute):
                raise self._error(self._no_attribute("node", self._options.name_attribute))
            if name:
                self._counts.names[node] = name

    def _edge(self, attributes: dict[str, str], values: dict[str, str]) -> None:
        self._counts.edges += 1
        directed = attributes.get("directed")
        self._counts.undirected += not (self._is_directed[-1] if directed is None else directed == "true")
        source, target = attributes["source"], attributes["target"]
        name = self._relation_attribute()
        if name is None:
            relation: str | None = NO_RELATION
        elif name == "id" and not self._declared("edge", name):
            # NetworkX writes the key of a multigraph's edge as its id.
            relation = attributes.get("id")
        else:
            relation = self._value("edge", name, values)
        if not relation:
            raise self._error(
                f"the edge from {source!r} to {target!r} has no {name!r}, which is its relation"
            )
        self._add(source, relation, target)

    def _add(self, *row: str) -> None:
        for column, value in zip(self.rows, row):
            column.append(value)

    def _relation_attribute(self) -> str | None:
        """Return the attribute that is the relation, None if the file has none."""
        wanted = self._options.relation_attribute
        if wanted is not None:
            if wanted != "id" and not self._declared("edge", wanted):
                raise self._error(self._no_attribute("edge", wanted))
            self._counts.relation = wanted
            return wanted
        if self._relation_keys is None:
            self._relation_keys = [name for name in RELATION_ATTRIBUTES if self._declared("edge", name)]
        if not self._relation_keys:
            return None
        self._counts.relation = self._relation_keys[0]
        return self._relation_keys[0]

    def _declared(self, domain: str, name: str) -> bool:
        return any(key.domain in (domain, "all") and key.name == name for key in self._keys.values())

    def _value(self, domain: str, name: str, values: dict[str, str]) -> str | None:
        for id_, key in self._keys.items():
            if key.name == name and key.domain in (domain, "all"):
                return values.get(id_, key.default)
        return None

    def _no_attribute(self, domain: str, name: str) -> str:
        known = sorted({key.name for key in self._keys.values() if key.domain in (domain, "all")})
        has = f"has {', '.join(known)}" if known else "has none"
        return f"no attribute {name!r} of {domain}s is declared; the file {has}"

    def _required(self, element: str, attributes: dict[str, str], name: str) -> str:
        if not attributes.get(name):
            raise self._error(f"the <{element}> has no {name!r}")
        return attributes[name]

    def _error(self, message: str) -> InputError:
        return InputError(f"{self._path}:{self._xml.CurrentLineNumber}: {message}")
