"""Reads the triples of files: tables of text and Parquet, RDF, GraphML, and folders of other projects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dglkge.data.dataset_files import TRAIN
from dglkge.data.quality import BUCKET_BYTES
from dglkge.data.text_format import EXTENSIONS, Columns, RowRules, extension
from dglkge.data.triples import TripleFile, header_of, place_of_row
from dglkge.errors import InputError
from dglkge.partition.entity_types import take_types
from dglkge.partition.ingest import (
    Chunks,
    IdTriples,
    Reading,
    SplitFiles,
    Watch,
    available_cores,
    bytes_at_a_time,
    check_names,
    ingest_ids,
    ingest_names,
)
from dglkge.partition.name_index import MAX_NAMES
from dglkge.partition.options import DGL, GRAPHML, TABLE, Format, Options
from dglkge.partition.readers.dgl_graph import read_graphs
from dglkge.partition.readers.find import Source, find_input
from dglkge.partition.readers.graphml import read_graphml
from dglkge.partition.readers.id_folders import read_id_map
from dglkge.partition.readers.rdf import read_rdf
from dglkge.partition.report import reading_progress, show_line


def read_files(inputs: Sequence[Path], temporary: Path, options: Options, delimiter: str | None) -> Reading:
    """Find out the input's format and read it.

    Parameters
    ----------
    inputs : sequence of Path
        As of :func:`dglkge.partition.make_dataset.partition_files`.
    temporary : Path
        Folder for temporary files.
    options : Options
    delimiter : str or None
        Instead of the comma of CSV and the tab of other text files.

    Raises
    ------
    InputError
        If the input is wrong; the message names file and line.
    """
    source = find_input(inputs, options)
    show_line(options.progress, source.line)
    with reading_progress(source.paths, options.progress) as watch:
        if source.family == TABLE:
            reading = _read_tables(source, temporary, options, delimiter, watch)
        elif delimiter is not None:
            raise InputError(f"--delimiter is for tables, and the input is {source.title}")
        else:
            reading = read_input(source, options, watch, temporary)
    take_types(reading, options, source.family)
    reading.figures = {**source.figures(), **reading.figures}
    reading.notes.insert(0, source.line)
    return reading


def read_input(source: Source, options: Options, watch: Watch, temporary: Path) -> Reading:
    """Read an input that is no table.

    Parameters
    ----------
    source : Source
    options : Options
    watch : callable
        Progress.
    temporary : Path
        Folder for temporary files.

    Raises
    ------
    InputError
        If a file is wrong; the message names file and line.
    """
    if source.folder is not None:
        return source.folder.read(watch, options)
    if source.family == DGL:
        return read_graphs(source.files, options, watch)
    if source.family == GRAPHML:
        return read_graphml(source.files, options.reading, watch)
    return read_rdf(source.files, options.reading, watch, temporary)


def _read_tables(
    source: Source, temporary: Path, options: Options, delimiter: str | None, watch: Watch
) -> Reading:
    """Read text and Parquet files."""
    maps, columns = IdMaps.read(options), options.columns
    num_workers = options.num_workers or available_cores()
    read_bytes = bytes_at_a_time(options.max_memory or BUCKET_BYTES, num_workers)

    def reader(path: Path, kind: Format) -> TripleFile:
        return TripleFile(path, columns, delimiter, maps.rules, kind=kind.name, read_bytes=read_bytes)

    def place(split: str, row: int) -> str:
        (path, _), *others = source.files[split]
        if others or extension(path) not in EXTENSIONS:
            return ", ".join(str(path) for path, _ in source.files[split])
        return place_of_row(path, row, columns, delimiter)

    files = {split: [reader(*file) for file in files] for split, files in source.files.items()}
    triples = maps.ingest(SplitFiles(files, watch, num_workers), columns, temporary)
    reading = Reading(triples, columns=columns, place=place)
    path, kind = source.files[TRAIN][0]
    header = header_of(path, columns, delimiter, kind.name) if kind.name != "parquet" else {}
    if header:
        reading.notes.append("header: " + ", ".join(f"{role} is {name!r}" for role, name in header.items()))
    return reading


@dataclass(frozen=True)
class IdMaps:
    """Id maps of triples of integer ids."""

    integer_ids: bool
    entities: list[str] | None
    relations: list[str] | None

    @classmethod
    def read(cls, options: Options) -> IdMaps:
        """Read the maps that the options name."""
        entities = read_id_map(options.entity_map, "entity") if options.entity_map else None
        relations = read_id_map(options.relation_map, "relation") if options.relation_map else None
        check_names((), relations or ())
        return cls(options.integer_ids, entities, relations)

    @property
    def rules(self) -> RowRules:
        """What the rows of a file must hold."""
        if not self.integer_ids:
            return RowRules()
        num_entities = len(self.entities) if self.entities else MAX_NAMES
        num_relations = len(self.relations) if self.relations else MAX_NAMES
        return RowRules({"head": num_entities, "relation": num_relations, "tail": num_entities})

    def ingest(self, source: Chunks | SplitFiles, columns: Columns, folder: Path | None = None) -> IdTriples:
        """Number the triples of all splits."""
        if self.integer_ids:
            return ingest_ids(source, self.entities, self.relations, columns, folder)
        return ingest_names(source, folder)
