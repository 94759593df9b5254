"""Reads N-Triples, N-Quads, Turtle and TriG with pyoxigraph, a chunk of triples at a time."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

import yaml

from dglkge.data.dataset_files import NUMERIC_LITERALS
from dglkge.data.text_format import bare_path, open_stream, read_errors
from dglkge.errors import InputError, StorageError, import_extra, os_errors
from dglkge.partition.ingest import Chunk, IdTriples, Reading, Watch, ingest, name_chunks, renamed
from dglkge.partition.options import DEFAULT_GRAPH, Files, Format, ReadingOptions, format_by_content

MAX_GRAPHS = 100_000
"""Named graphs are counted up to here: some collections have one for each triple."""

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
# Names that pyoxigraph draws for "[]" in Turtle; a label of the file that looks so is numbered as well.
_DRAWN = re.compile(r"[0-9a-f]{24,32}")
_POSITION = re.compile(r"^Parser error [^:]*: ")


_PREFIXES = Path(__file__).with_name("prefixes.yaml")
WELL_KNOWN: dict[str, str] = yaml.safe_load(_PREFIXES.read_text(encoding="utf-8"))
"""Prefixes that are used without being declared. A declared one of the same name replaces it."""


class PrefixTable:
    """A table of prefixes in which every name and every IRI stands once.

    The name of an IRI is ``prefix:rest`` for the longest IRI of the table that it begins with. An IRI without
    a prefix is its own name, or ``<IRI>`` if it could be taken for a name with a prefix. So two IRIs never
    have the same name, and :meth:`expand` gives the IRI back.

    Of several tables an earlier one wins, within a table the earlier entry: a later prefix of the same name,
    or for the same IRI, is not used.

    Examples
    --------
    >>> table = PrefixTable({"ex": "http://example.org/"})
    >>> table.shorten("http://example.org/Rome"), table.expand("ex:Rome"), table.shorten("ex:Rome")
    ('ex:Rome', 'http://example.org/Rome', '<ex:Rome>')
    """

    def __init__(self, *tables: Mapping[str, str]) -> None:
        self.iris: dict[str, str] = {}
        self._names: dict[str, str] = {}
        for name, iri in chain(*(table.items() for table in tables)):
            if iri and name not in self.iris and iri not in self._names:
                self.iris[name], self._names[iri] = iri, name
        self._lengths = sorted(set(map(len, self._names)), reverse=True)
        self.used: dict[str, str] = {}

    def shorten(self, iri: str) -> str:
        """Return the name of an IRI."""
        stem = next((iri[:length] for length in self._lengths if iri[:length] in self._names), None)
        if stem is None:
            return f"<{iri}>" if iri.partition(":")[0] in self.iris else iri
        name = self._names[stem]
        self.used[name] = stem
        return f"{name}:{iri.removeprefix(stem)}"

    def expand(self, name: str) -> str:
        """Return the IRI of a name; a text that is no name of the table is returned as it is."""
        if name.startswith("<") and name.endswith(">"):
            return name[1:-1]
        prefix, colon, rest = name.partition(":")
        return self.iris[prefix] + rest if colon and prefix in self.iris else name


_NUMBER_TYPES = "integer decimal float double long int short byte nonNegativeInteger positiveInteger "
_NUMBER_TYPES += "nonPositiveInteger negativeInteger unsignedLong unsignedInt unsignedShort unsignedByte"
_NUMERIC = {WELL_KNOWN["xsd"] + name for name in _NUMBER_TYPES.split()}


def read_rdf(files: Files, options: ReadingOptions, watch: Watch, temporary: Path) -> Reading:
    """Read RDF files; the temporary folder is for the numbers with ``literals="numeric"``.

    Raises
    ------
    InputError
        If pyoxigraph is missing, or a file cannot be read or has an error, or a split has no triples.
    """
    reader = _RdfReader(options, temporary)
    return reader.finish(ingest({split: reader.split(split, paths, watch) for split, paths in files.items()}))


def _blank_names(tag: str) -> Callable[[str], str]:
    """Return the names of a file's blank nodes: ``_:file.label``, and ``_:file.[0]`` for one without."""
    numbers: dict[str, int] = {}

    def name(value: str) -> str:
        if _DRAWN.fullmatch(value):
            # A drawn name differs from run to run; the order of appearance does not. No label has brackets.
            value = f"[{numbers.setdefault(value, len(numbers))}]"
        return f"_:{tag}.{value}"

    return name


class _RdfReader:
    """Reads the files of all splits; keeps counts, prefixes and numbers."""

    def __init__(self, options: ReadingOptions, temporary: Path) -> None:
        self._options = options
        self._rdf = import_extra("reading RDF", "pyoxigraph", "rdf")
        self._counts: Counter[str] = Counter()
        self._prefixes: list[dict[str, str]] = []
        self._tags: set[str] = set()
        self._graphs: set[str] = set()
        # As IRIs: the user may have written a prefix.
        table = PrefixTable(options.prefixes, WELL_KNOWN)
        self._graphs_to_read = {table.expand(graph) for graph in options.graphs}
        # Without a name, so that nothing is left behind, whatever happens.
        self._numbers: IO[str] | None = None
        if options.literals == "numeric":
            self._numbers = tempfile.TemporaryFile("w+", encoding="utf-8", newline="", dir=temporary)

    def split(self, split: str, files: Sequence[tuple[Path, Format]], watch: Watch) -> Iterator[Chunk]:
        """Yield the triples of the files of a split."""
        is_empty, before = True, self._counts.copy()
        for path, format_ in files:
            for chunk in self._chunks(path, format_, watch):
                is_empty = False
                yield chunk
        if is_empty:
            raise self._empty_error(split, [path for path, _ in files], self._counts - before)

    def finish(self, triples: IdTriples) -> Reading:
        """Shorten the names, and return everything that was read."""
        prefixes = (self._options.prefixes, *self._prefixes, WELL_KNOWN)
        table = PrefixTable(*(() if self._options.full_iris else prefixes))
        entities = [_final_name(name, table) for name in triples.entities]
        relations = [table.shorten(name) for name in triples.relations]
        figures: dict[str, Any] = {
            "literals": {"policy": self._options.literals, "seen": self._counts["literals"]},
            "blank_nodes": sum(name.startswith("_:") for name in entities),
            "quads_in_named_graphs": self._counts["in named graphs"],
            "named_graphs": len(self._graphs),
            "outside_wanted_graphs": self._counts["in other graphs"],
            "triple_terms_dropped": self._counts["triple terms"],
            "prefixes": dict(sorted(table.used.items())),
        }
        reading = Reading(renamed(triples, entities, relations), figures=figures, notes=self._notes())
        if self._numbers is not None:
            figures["literals"]["numeric"] = self._counts["numbers"]
            reading.write_side_files = partial(_write_numbers, self._numbers, table, figures["literals"])
        return reading

    def _chunks(self, path: Path, format_: Format, watch: Watch) -> Iterator[Chunk]:
        is_start = True
        try:
            with read_errors(path), open_stream(path) as (raw, stream):
                rdf_format = getattr(self._rdf.RdfFormat, _PARSERS[format_.name])
                parser = self._rdf.parse(stream, rdf_format, base_iri=self._options.base_iri)
                for chunk in name_chunks(self._rows(parser, _blank_names(self._tag(path)))):
                    is_start = False
                    yield chunk
                    watch(path, raw.tell())
        except SyntaxError as error:
            raise self._syntax_error(path, format_, error, is_start) from error
        self._prefixes.append(dict(parser.prefixes))

    def _rows(self, parser: Any, blank_name: Callable[[str], str]) -> Iterator[tuple[str, str, str]]:
        counts, graphs = self._counts, self._graphs_to_read
        # Local names: this loop is most of the time of reading.
        default_graph, iri, blank = self._rdf.DefaultGraph, self._rdf.NamedNode, self._rdf.BlankNode
        literal = self._rdf.Literal
        for quad in parser:
            graph = quad.graph_name
            if (graphs or type(graph) is not default_graph) and not self._keep_graph(graph):
                continue
            subject, object_ = quad.subject, quad.object
            head = subject.value if type(subject) is iri else blank_name(subject.value)
            if type(object_) is iri:
                tail = object_.value
            elif type(object_) is blank:
                tail = blank_name(object_.value)
            elif type(object_) is not literal:
                counts["triple terms"] += 1
                continue
            else:
                counts["literals"] += 1
                if self._options.literals != "entities":
                    self._note_number(head, quad)
                    continue
                tail = str(object_)
            yield head, quad.predicate.value, tail

    def _keep_graph(self, graph: Any) -> bool:
        """Count a quad that is in a named graph, and return whether the user wants its graph."""
        name = DEFAULT_GRAPH if type(graph) is self._rdf.DefaultGraph else graph.value
        if name != DEFAULT_GRAPH:
            self._counts["in named graphs"] += 1
            if len(self._graphs) < MAX_GRAPHS:
                self._graphs.add(name)
        is_read = not self._graphs_to_read or name in self._graphs_to_read
        self._counts["in other graphs"] += not is_read
        return is_read

    def _note_number(self, head: str, quad: Any) -> None:
        """Write the triple of a numeric literal to the temporary file, if there is one."""
        if self._numbers is None or quad.object.datatype.value not in _NUMERIC:
            return
        value = quad.object.value.strip()
        if _NUMBER.fullmatch(value):
            self._counts["numbers"] += 1
            with os_errors(StorageError, "cannot write numeric literals"):
                # IRIs and labels of blank nodes have no tabs and line ends.
                self._numbers.write(f"{head}\t{quad.predicate.value}\t{value}\n")

    def _tag(self, path: Path) -> str:
        """Return a word for a file that no other file of the input has."""
        stem = re.sub(r"[^A-Za-z0-9_-]", "_", bare_path(path).stem)
        tag, number = stem, 2
        while tag in self._tags:
            tag, number = f"{stem}-{number}", number + 1
        self._tags.add(tag)
        return tag

    def _syntax_error(self, path: Path, format_: Format, error: SyntaxError, is_start: bool) -> InputError:
        reason = _POSITION.sub("", error.msg)
        place = f"{path}:{error.lineno}" if error.lineno else str(path)
        column = f"column {error.offset}: " if error.offset else ""
        message = f"{place}: {column}{reason} (read as {format_.title})"
        if "No scheme found" in reason:
            return InputError(f"{message}; relative IRIs need --base-iri")
        looks_like = format_by_content(path) if is_start else None
        if looks_like is not None and looks_like != format_:
            message += f"; it looks like {looks_like.title}: --format {looks_like.name}"
        return InputError(message)

    def _empty_error(self, split: str, paths: list[Path], counts: Counter[str]) -> InputError:
        place = str(paths[0]) if len(paths) == 1 else f"the {len(paths)} files of {split}"
        why = "there are no triples"
        if counts["in other graphs"]:
            graphs = sorted(self._graphs)
            some = f"its named graphs are {', '.join(graphs[:5])}" if graphs else "there are no named graphs"
            why = f"no triple is in the graph {' or '.join(self._options.graphs)}; {some}"
        elif counts["literals"]:
            why = f"all {counts['literals']:,} objects are literals; see --literals entities"
        return InputError(f"{place}: {why}")

    def _notes(self) -> list[str]:
        """Return a line about what was dropped, if anything was."""
        counts, notes = self._counts, []
        if counts["literals"]:
            fate = {
                "drop": "dropped (see --literals)",
                "entities": "are kept as entities",
                "numeric": f"dropped, {counts['numbers']:,} of them numbers for {NUMERIC_LITERALS}",
            }[self._options.literals]
            notes.append(f"{counts['literals']:,} triples with literals {fate}")
        if counts["in named graphs"]:
            more = " or more" if len(self._graphs) == MAX_GRAPHS else ""
            graphs = f"{counts['in named graphs']:,} triples in {len(self._graphs):,}{more} named graphs"
            unread = f"{counts['in other graphs']:,} others are not read"
            notes.append(f"{graphs}, whose {unread if self._graphs_to_read else 'names are ignored'}")
        if counts["triple terms"]:
            notes.append(f"{counts['triple terms']:,} triples about triples dropped")
        return notes


_PARSERS = {"ntriples": "N_TRIPLES", "nquads": "N_QUADS", "turtle": "TURTLE", "trig": "TRIG"}
"""pyoxigraph's name of each format."""


def _final_name(name: str, table: PrefixTable) -> str:
    """Return the name of an entity in the data set: IRIs and datatypes get their prefixes."""
    if name.startswith("_:"):
        return name
    if not name.startswith('"'):
        return table.shorten(name)
    text, mark, datatype = name.rpartition('"^^<')
    if not mark or not name.endswith(">"):
        return name
    iri = datatype[:-1]
    short = table.shorten(iri)
    # A datatype without a prefix keeps its brackets, as in N-Triples.
    return name if short in (iri, f"<{iri}>") else f'{text}"^^{short}'


def _write_numbers(
    numbers: IO[str], table: PrefixTable, figures: dict[str, Any], folder: Path, names: Sequence[str]
) -> None:
    """Write the numbers of the entities of the data set, with the names that these have there."""
    figures["written"], entities = 0, set(names)
    with numbers as lines, open(folder / NUMERIC_LITERALS, "w", encoding="utf-8", newline="") as file:
        lines.seek(0)
        for line in lines:
            entity, attribute, value = line.split("\t")
            name = _final_name(entity, table)
            if name in entities:
                file.write(f"{name}\t{table.shorten(attribute)}\t{value}")
                figures["written"] += 1
