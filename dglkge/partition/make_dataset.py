"""Makes a data set folder of triples in files or data frames. ``partition_tools/partition.py`` calls this."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dglkge import __version__
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import PARTITIONS, REPORT, SPLITS, TRAIN, Field
from dglkge.data.text_format import EXTENSIONS, Columns, RowRules, extension, parse_columns
from dglkge.data.triples import frame_chunks, place_of_row, read_chunks
from dglkge.errors import InputError
from dglkge.partition.column_order import column_order_advice
from dglkge.partition.dataset_writer import check_output, staged, write_description, write_triples
from dglkge.partition.ingest import MAX_NAMES, IdTriples, assign_ids, check_names, ingest_ids, ingest_names
from dglkge.partition.inputs import (
    Options,
    check_num_parts,
    check_options,
    find_sources,
    read_id_map,
    types_of_entities,
)
from dglkge.partition.leaks import Place, check_leaks, drop_leaks, measure_triples
from dglkge.partition.report import partition_figures, reading_progress, show_line
from dglkge.partition.run_build import GraphJob, run_build
from dglkge.partition.splits import split_by_hash
from dglkge.typing import RELATION

logger = logging.getLogger(__name__)


def partition_files(
    inputs: Sequence[Path], output: Path, options: Options | None = None, delimiter: str | None = None
) -> dict[str, Any]:
    """Partition the triples of files.

    Parameters
    ----------
    inputs : sequence of Path
        One folder with train, valid and test files, or up to three files.
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
    check_options(options)
    check_output(output, options.overwrite)
    sources = find_sources(inputs)
    maps = _IdMaps.read(options)
    with reading_progress(list(sources.values()), options.progress) as on_bytes:
        chunks = {
            split: read_chunks(path, options.columns, delimiter, maps.rules, on_bytes(path))
            for split, path in sources.items()
        }
        triples = maps.ingest(chunks, options.columns)

    def place(split: str, row: int) -> str:
        path = sources[split]
        return (
            place_of_row(path, row, options.columns, delimiter)
            if extension(path) in EXTENSIONS
            else str(path)
        )

    return _make(triples, output, options, options.columns, place)


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
    check_options(options)
    check_output(Path(output), options.overwrite)
    maps = _IdMaps.read(options)
    where = parse_columns(columns)
    frames = {split: frame for split, frame in zip(SPLITS, (train, valid, test)) if frame is not None}
    chunks = {split: frame_chunks(frame, where, maps.rules, split) for split, frame in frames.items()}
    triples = maps.ingest(chunks, where)
    return _make(triples, Path(output), options, where, lambda split, row: f"{split}: row {row + 1}")


@dataclass(frozen=True)
class _IdMaps:
    """Id maps of triples of integer ids."""

    integer_ids: bool
    entities: list[str] | None
    relations: list[str] | None

    @classmethod
    def read(cls, options: Options) -> _IdMaps:
        entities = read_id_map(options.entity_map, "entity") if options.entity_map else None
        relations = read_id_map(options.relation_map, "relation") if options.relation_map else None
        check_names(relations or [], "relation", "\t")
        return cls(options.integer_ids, entities, relations)

    @property
    def rules(self) -> RowRules:
        if not self.integer_ids:
            return RowRules()
        num_entities = len(self.entities) if self.entities else MAX_NAMES
        num_relations = len(self.relations) if self.relations else MAX_NAMES
        return RowRules({"head": num_entities, "relation": num_relations, "tail": num_entities})

    def ingest(self, chunks: Mapping[str, Iterable[pd.DataFrame]], columns: Columns) -> IdTriples:
        if self.integer_ids:
            return ingest_ids(chunks, self.entities, self.relations, columns)
        return ingest_names(chunks)


def _make(
    triples: IdTriples, output: Path, options: Options, columns: Columns, place: Place
) -> dict[str, Any]:
    """Split, type and number the triples, check them, and build the dataset folder."""
    names = () if options.integer_ids else (triples.entities, triples.relations)
    advice = column_order_advice(triples.splits, columns, *names)
    if advice:
        logger.warning(advice)
    if options.split:
        if set(triples.splits) != {TRAIN}:
            raise InputError(f"--split needs one set of triples, got {', '.join(triples.splits)}")
        triples = split_by_hash(triples, options.split, options.seed)
    types, type_of = types_of_entities(options.entity_types, triples.entities, options.integer_ids)
    ids = assign_ids(triples.splits, triples.relations, types, type_of)
    check_num_parts(options.num_parts, {**ids.num_entities(), RELATION: len(ids.relations)})
    show_line(options.progress, "measuring the quality of the data")
    quality = measure_triples(triples, ids)
    dropped: dict[str, int] = {}
    if options.drop_leaks:
        triples, dropped = drop_leaks(triples, quality.leaks, options.drop_leaks)
        quality = measure_triples(triples, ids)
    if options.strict_splits is not None:
        # A split and dropping change the numbers of the rows.
        in_order = not (options.split or options.drop_leaks)
        check_leaks(triples, quality, options.strict_splits, place if in_order else None)
    measured = quality.report
    del quality
    name = options.name or output.absolute().name
    with staged(output, options.overwrite) as folder:
        description = write_triples(folder, triples, ids)
        # The child needs the memory. It reads the triples from the files that were written.
        del triples, ids, type_of
        # DGL makes file names of the graph's name.
        graph_name = re.sub(r"[^A-Za-z0-9_-]", "_", name)
        keys = (Field.ENTITY_TYPES, Field.EDGE_TYPES, Field.NUM_RELATIONS, Field.HAS_WEIGHTS)
        show_line(options.progress, f"partitioning into {options.num_parts} ({options.method})")
        run_build(
            folder,
            GraphJob(
                graph_name,
                options.num_parts,
                options.method,
                options.seed,
                *(description[key] for key in keys),
            ),
        )
        description |= {
            Field.NAME: name,
            Field.GRAPH_NAME: graph_name,
            Field.NUM_PARTS: options.num_parts,
            Field.PART_METHOD: options.method,
            Field.SEED: options.seed,
            Field.IDS: "integers" if options.integer_ids else "names",
            Field.CREATED_BY: f"dglkge {__version__}",
            Field.UNSEEN: measured["unseen"],
            Field.DUPLICATES: measured["duplicates"],
        }
        figures = {
            **partition_figures(Dataset(folder, description)),
            "warnings": [advice] if advice else [],
            "dropped_leaks": dropped,
            Field.QUALITY: measured,
        }
        (folder / PARTITIONS / REPORT).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        write_description(folder, description)
    return figures
