"""Makes a data set folder of triples in files or data frames. ``partition_tools/partition.py`` calls this."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from dglkge import __version__
from dglkge.data.dataset_files import SPLITS, TRAIN, TRAIN_WEIGHTS, Field
from dglkge.data.quality import BUCKET_BYTES
from dglkge.data.text_format import EXTENSIONS, Columns, RowRules, extension, parse_columns
from dglkge.data.triples import TripleFile, frame_chunks, header_of, place_of_row
from dglkge.errors import InputError
from dglkge.partition.dataset_writer import check_output, finish_dataset, staged, write_triples
from dglkge.partition.entity_types import assign_ids, take_types, types_of_entities
from dglkge.partition.ingest import (
    Chunks,
    IdTriples,
    Reading,
    SplitFiles,
    Watch,
    available_cores,
    bytes_at_a_time,
    check_names,
    column_order_advice,
    ingest_ids,
    ingest_names,
)
from dglkge.partition.name_index import MAX_NAMES
from dglkge.partition.options import GRAPHML, TABLE, Format, Options
from dglkge.partition.readers.find import Source, find_input
from dglkge.partition.readers.graphml import read_graphml
from dglkge.partition.readers.id_folders import read_id_map
from dglkge.partition.readers.rdf import read_rdf
from dglkge.partition.report import reading_progress, show_line
from dglkge.partition.splits import check_leaks, drop_leaks, measure_triples, split_by_hash
from dglkge.typing import RELATION

METIS_TRIPLE_BYTES = 250
"""Peak of METIS for each triple. Measured were 240 with 10^6 triples and 230 with 10^7, in four partitions:
``growth.py partition --partition_options "--num_parts 4"`` less the same with ``--method random``."""

logger = logging.getLogger(__name__)


def partition_files(
    inputs: Sequence[Path], output: Path, options: Options | None = None, delimiter: str | None = None
) -> dict[str, Any]:
    """Partition the triples of files.

    Parameters
    ----------
    inputs : sequence of Path
        One folder, or up to three files for train, valid and test; with ``options.split`` any number of files
        of one set of triples. Their format is found out (see docs/inputs.md).
    output : Path
        The data set folder to make.
    options : Options, optional
    delimiter : str, optional
        Instead of the comma of CSV and the tab of other text files.

    Returns
    -------
    dict
        The content of ``partitions/report.json``.

    Raises
    ------
    InputError
        If the input is wrong; the message names file and line.
    """
    # All options and the output are checked first: reading the triples may take minutes.
    options = options or Options()
    check_output(output, options.overwrite)
    return _make(_read(inputs, output, options, delimiter), output, options)


def _read(inputs: Sequence[Path], output: Path, options: Options, delimiter: str | None) -> Reading:
    """Find out the input's format and read it."""
    source = find_input(inputs, options)
    show_line(options.progress, source.line)
    with reading_progress(source.paths, options.progress) as watch:
        if source.family == TABLE:
            reading = _read_tables(source, output, options, delimiter, watch)
        elif delimiter is not None:
            raise InputError(f"--delimiter is for tables, and the input is {source.title}")
        else:
            reading = read_input(source, options, watch, output.absolute().parent)
    take_types(reading, options, source.family)
    reading.figures = {**source.figures(), **reading.figures, "notes": [source.line, *reading.notes]}
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
        return source.folder.read(watch)
    if source.family == GRAPHML:
        return read_graphml(source.files, options.reading, watch)
    return read_rdf(source.files, options.reading, watch, temporary)


def _read_tables(
    source: Source, output: Path, options: Options, delimiter: str | None, watch: Watch
) -> Reading:
    """Read text and Parquet files."""
    maps, columns = _IdMaps.read(options), options.columns
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
    triples = maps.ingest(SplitFiles(files, watch, num_workers), columns, output.absolute().parent)
    reading = Reading(triples, columns=columns, place=place)
    path, kind = source.files[TRAIN][0]
    header = header_of(path, columns, delimiter, kind.name) if kind.name == "csv" else {}
    if header:
        reading.notes.append("header: " + ", ".join(f"{role} is {name!r}" for role, name in header.items()))
    return reading


def partition_dataframe(
    train: pd.DataFrame,
    output: str | Path,
    valid: pd.DataFrame | None = None,
    test: pd.DataFrame | None = None,
    columns: str = "head,relation,tail",
    options: Options | None = None,
) -> dict[str, Any]:
    """Partition the triples of pandas data frames.

    Parameters
    ----------
    train : DataFrame
        One triple per row.
    output : str or Path
        The data set folder to make.
    valid, test : DataFrame, optional
        Further splits, with the same columns.
    columns : str
        The columns' names, as for ``--columns``: ``"subject,predicate,object"``, or
        ``"head=subject,relation=predicate,tail=object,weight=score"``.
    options : Options, optional
        Its ``columns`` are ignored.

    Returns
    -------
    dict
        The content of ``partitions/report.json``.

    Raises
    ------
    InputError
        If the input is wrong; the message names split and row.

    Examples
    --------
    >>> frame = pd.DataFrame({"head": ["Rome"], "relation": ["capital_of"], "tail": ["Italy"]})
    >>> figures = partition_dataframe(frame, "data/capitals")  # doctest: +SKIP
    """
    options = options or Options()
    check_output(Path(output), options.overwrite)
    maps = _IdMaps.read(options)
    where = parse_columns(columns)
    frames = {split: frame for split, frame in zip(SPLITS, (train, valid, test)) if frame is not None}
    chunks = {split: frame_chunks(frame, where, maps.rules, split) for split, frame in frames.items()}
    triples = maps.ingest(chunks, where)
    reading = Reading(triples, columns=where, place=lambda split, row: f"{split}: row {row + 1}")
    return _make(reading, Path(output), options)


@dataclass(frozen=True)
class _IdMaps:
    """Id maps of triples of integer ids."""

    integer_ids: bool
    entities: list[str] | None
    relations: list[str] | None

    @classmethod
    def read(cls, options: Options) -> _IdMaps:
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


def metis_memory(num_triples: int, max_memory: int | None) -> int:
    """Return the bytes that METIS needs.

    Raises
    ------
    InputError
        If that is more than the limit, or without a limit more than the machine has free.
    """
    needed = METIS_TRIPLE_BYTES * num_triples
    limit, where = max_memory, "--max-memory is"
    if limit is None:
        limit, where = psutil.virtual_memory().available, "the machine's free memory is"
    if needed > limit:
        raise InputError(
            f"METIS needs about {needed / 1e9:.1f} GB for {num_triples:,} triples, "
            f"{where} {limit / 1e9:.1f} GB: give --method ldg or random"
        )
    return needed


def check_num_parts(num_parts: int, counts: dict[str, int]) -> None:
    """Check that every partition can own a node of every type; DGL cannot store one that does not.

    Raises
    ------
    InputError
        If there are fewer entities of some type, or relations, than partitions.
    """
    for noun, count in counts.items():
        if num_parts > count:
            what = "relations" if noun == RELATION else f"entities of type {noun!r}"
            raise InputError(
                f"{num_parts} partitions are more than there are {what} ({count}): "
                "every partition must own at least one"
            )


def _make(reading: Reading, output: Path, options: Options) -> dict[str, Any]:
    """Split, type and number the triples, check them, and build the dataset folder."""
    triples, typing, columns, place = reading.triples, reading.types, reading.columns, reading.place
    input_figures, write_side_files = reading.figures, reading.write_side_files
    del reading
    advice = None
    if columns is not None:
        names = () if options.integer_ids else (triples.entities, triples.relations)
        advice = column_order_advice(triples.splits, columns, *names)
    if advice:
        logger.warning(advice)
    if options.split:
        if set(triples.splits) != {TRAIN}:
            raise InputError(f"--split needs one set of triples, got {', '.join(triples.splits)}")
        triples = split_by_hash(triples, options.split, options.seed, output.absolute().parent)
    types, type_of = typing or types_of_entities(options.entity_types, triples.entities, options.integer_ids)
    ids = assign_ids(triples.splits, triples.relations, types, type_of)
    check_num_parts(options.num_parts, {**ids.num_entities(), RELATION: len(ids.relations)})
    num_workers = options.num_workers or available_cores()
    bucket_bytes = BUCKET_BYTES if options.max_memory is None else options.max_memory // 2
    if options.num_parts > 1 and options.method == "metis":
        needed = metis_memory(len(triples.splits[TRAIN]), options.max_memory)
        show_line(options.progress, f"METIS will need about {needed / 1e9:.1f} GB")
    show_line(options.progress, "measuring the quality of the data")
    measure = partial(measure_triples, ids=ids, bucket_bytes=bucket_bytes, num_workers=num_workers)
    dropped: dict[str, int] = {}
    name = options.name or output.absolute().name
    with ThreadPoolExecutor(1) as beside, staged(output, options.overwrite) as folder:
        if options.drop_leaks:
            triples, dropped = drop_leaks(triples, measure(triples).leaks, options.drop_leaks)
        quality = beside.submit(measure, triples)
        if options.strict_splits is not None:
            # A split and dropping change the numbers of the rows.
            in_order = not (options.split or options.drop_leaks)
            check_leaks(triples, quality.result(), options.strict_splits, place if in_order else None)
        # Beside the measurement, which leaves cores idle in parts.
        weights = {TRAIN_WEIGHTS: triples.weights[TRAIN]} if TRAIN in triples.weights else {}
        named = ids.vocabularies(triples.entities)
        description = write_triples(folder, named, ids.relations, triples.splits, weights, ids.original_ids)
        write_side_files(folder, triples.entities)
        measured = quality.result().report
        # The child needs the memory. It reads the triples from the files that were written.
        del triples, ids, type_of, typing, measure, quality, weights
        show_line(options.progress, f"partitioning into {options.num_parts} ({options.method})")
        description |= {
            Field.NAME: name,
            # DGL makes file names of the graph's name.
            Field.GRAPH_NAME: re.sub(r"[^A-Za-z0-9_-]", "_", name),
            Field.NUM_PARTS: options.num_parts,
            Field.PART_METHOD: options.method,
            Field.SEED: options.seed,
            Field.IDS: "integers" if options.integer_ids else "names",
            Field.CREATED_BY: f"dglkge {__version__}",
            Field.INPUT: input_figures,
        }
        facts = {
            Field.INPUT: input_figures,
            "warnings": [advice] if advice else [],
            "dropped_leaks": dropped,
        }
        return finish_dataset(folder, description, measured, facts, num_workers=num_workers)
