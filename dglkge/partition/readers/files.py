"""Reads the triples of files: tables of text and Parquet, RDF, GraphML, and folders of other projects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dglkge.data.dataset_files import TRAIN
from dglkge.data.quality import BUCKET_BYTES
from dglkge.data.triples import TripleFile
from dglkge.errors import InputError
from dglkge.partition.entity_types import take_types
from dglkge.partition.ingest import Reading, Watch, available_cores, bytes_at_a_time, ingest, table_chunks
from dglkge.partition.options import DGL, GRAPHML, TABLE, Options
from dglkge.partition.readers.dgl_graph import read_graphs
from dglkge.partition.readers.find import Source, find_input
from dglkge.partition.readers.graphml import read_graphml
from dglkge.partition.readers.id_folders import read_id_maps
from dglkge.partition.readers.rdf import read_rdf
from dglkge.partition.report import reading_progress, show_line


def read_files(inputs: Sequence[Path], temporary: Path, options: Options, delimiter: str | None) -> Reading:
    """Find out the input's format and read it.

    Parameters
    ----------
    inputs : sequence of Path
        As of :func:`dglkge.partition.make_dataset.partition_triples`.
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
        elif source.folder is not None:
            reading = source.folder.read(watch, options)
        elif source.family == DGL:
            reading = read_graphs(source.files, options, watch)
        elif source.family == GRAPHML:
            reading = read_graphml(source.files, options.reading, watch)
        else:
            reading = read_rdf(source.files, options.reading, watch, temporary)
    take_types(reading, options, source.family)
    reading.figures = {**source.figures(), **reading.figures}
    reading.notes.insert(0, source.line)
    return reading


def _read_tables(
    source: Source, temporary: Path, options: Options, delimiter: str | None, watch: Watch
) -> Reading:
    """Read text and Parquet files."""
    maps, columns = read_id_maps(options), options.columns
    num_workers = options.num_workers or available_cores()
    read_bytes = bytes_at_a_time(options.max_memory or BUCKET_BYTES, num_workers)
    rules = None if maps is None else maps.rules
    files = {
        split: [
            TripleFile(path, columns, delimiter, rules, kind=kind.name, read_bytes=read_bytes)
            for path, kind in of_split
        ]
        for split, of_split in source.files.items()
    }

    def place(split: str, row: int) -> str:
        first, *others = files[split]
        return ", ".join(str(file.path) for file in files[split]) if others else first.places([row])[row]

    chunks = table_chunks(files, watch)
    triples = ingest(chunks, maps, columns, temporary, num_workers, options.time_granularity)
    reading = Reading(triples, columns=columns, place=place)
    header = files[TRAIN][0].header
    if header:
        reading.notes.append("header: " + ", ".join(f"{role} is {name!r}" for role, name in header.items()))
    return reading
