"""Turns whatever has triples into a :class:`Reading`: a name, files, data frames, arrays of ids, graphs.

Packages of others are not imported: an object is known by the attributes that its kind has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dglkge.data.dataset_files import SPLITS, TEST, TRAIN, VALID
from dglkge.data.public_data import PublicData, find_public, local_folder, public_data
from dglkge.data.text_format import ROLES, Columns, RowRules, columns_of_header, parse_columns
from dglkge.data.triples import frame_chunks
from dglkge.errors import InputError, os_errors, unknown_name
from dglkge.partition.entity_types import take_types
from dglkge.partition.ingest import Reading, ingest
from dglkge.partition.options import Options
from dglkge.partition.readers.dgl_graph import numbered_graph
from dglkge.partition.readers.files import WORDS, read_files
from dglkge.partition.readers.graphml import NO_RELATION, RELATION_ATTRIBUTES
from dglkge.partition.readers.id_folders import read_id_maps
from dglkge.partition.readers.numbered import Numbered, as_array, joined, numbered_edges, numbers, row_place

EXPECTED = (
    "expected a data frame (pandas, Polars, Arrow), an array of ids (n, 3), a list of (head, relation, tail),"
    " a graph of NetworkX, PyTorch Geometric or DGL, data of PyKEEN, OGB or Hugging Face, a path or a name"
)
_ATTRIBUTES = "mapped_triples canonical_etypes edge_types edges training to_pandas __array__".split()
"""Of objects that are not iterable."""


def read_source(source: Any, temporary: Path, options: Options, **splits: Any) -> Reading:
    """Read the triples of a source.

    Parameters
    ----------
    source : object
        A name of the registry, a path or several, or an object of a kind in :data:`EXPECTED`; a mapping of
        split to such objects too.
    temporary : Path
        Folder for temporary files.
    options : Options
    **splits
        Further splits, ``valid`` and ``test``, of the kind of the source; not with files.

    Raises
    ------
    InputError
        If the input is wrong; the message names file and line, or split and row.
    """
    paths = as_paths(source)
    if paths:
        entry = named_data(paths)
        if entry is None:
            return read_files(paths, temporary, options)
        return read_named(entry, temporary, options)[1]
    splits = _own_splits(source) or {TRAIN: source, **splits}
    present = {split: triples for split, triples in splits.items() if triples is not None}
    tables = {split: _table(triples, split, options) for split, triples in present.items()}
    numbered = {split: triples for split, triples in tables.items() if isinstance(triples, Numbered)}
    if 0 < len(numbered) < len(tables):
        raise InputError(f"{' and '.join(numbered)} has ids, the rest has names; give both in one form")
    reading = joined(numbered) if numbered else _read_frames(tables, options)
    take_types(reading, options, "table")
    return reading


def check_kind(source: Any, name: str) -> None:
    """Raise InputError, with the argument's name, for an object that has no triples."""
    if isinstance(source, (bytes, str)) or not (
        isinstance(source, Iterable) or any(hasattr(source, attribute) for attribute in _ATTRIBUTES)
    ):
        raise InputError(f"{name} is of type {type(source).__name__}; {EXPECTED}")


def as_paths(source: Any) -> list[Path]:
    """Return the paths of a source; empty if it is an object."""
    if isinstance(source, (str, os.PathLike)):
        return [Path(source)]
    if isinstance(source, Sequence) and all(isinstance(path, (str, os.PathLike)) for path in source):
        return [Path(path) for path in source]
    # A data set of OGB is the folder that it was read from.
    if hasattr(source, "get_edge_split") and hasattr(source, "root"):
        return [Path(source.root)]
    return []


def named_data(paths: Sequence[Path]) -> PublicData | None:
    """Return the data set of the registry that a path which is not there names, or None.

    Raises InputError if there is neither a file nor a data set.
    """
    if len(paths) != 1 or paths[0].exists():
        return None
    name = str(paths[0])
    if os.sep in name:  # a path; names of data sets have none, whatever else they are compared without
        return None
    entry = find_public(name)
    if entry is None and not paths[0].suffix:
        unknown = unknown_name("data set", name, public_data())
        raise InputError(f"{name}: there is no such file or folder; {unknown}")
    return entry


def read_named(entry: PublicData, temporary: Path, options: Options) -> tuple[Path, Reading]:
    """Read a data set of the registry, which is downloaded if it is not there; returns its folder too."""
    folder = local_folder(entry, options.progress)
    if entry.columns and options.columns == Columns():
        options = replace(options, columns=parse_columns(entry.columns))
    reading = read_files([folder], temporary, options)
    # Triples of types are taken out.
    if options.reading.types_from is None:
        triples = reading.triples
        counts = {split: len(rows) for split, rows in triples.splits.items()}
        entry.check_counts(len(triples.entities), len(triples.relations), counts, folder)
    reading.figures["name"] = entry.name
    reading.notes.append(f"{entry.name}: {entry.citation}; licence: {entry.licence}")
    return folder, reading


def _own_splits(source: Any) -> dict[str, Any]:
    """Return the splits of a mapping of them, or of a data set of PyKEEN; empty for anything else."""
    if isinstance(source, Mapping) and source and all(str(key).lower() in WORDS for key in source):
        splits = {WORDS[str(key).lower()]: triples for key, triples in source.items()}
        if TRAIN not in splits:
            raise InputError(f"the splits are {', '.join(source)}; expected train among them")
        return {split: splits.get(split) for split in SPLITS}
    if hasattr(source, "training") and hasattr(source, "testing"):
        return {TRAIN: source.training, VALID: getattr(source, "validation", None), TEST: source.testing}
    return {}


def _read_frames(tables: Mapping[str, Any], options: Options) -> Reading:
    maps = read_id_maps(options)
    rules = RowRules() if maps is None else maps.rules
    columns = {split: _columns(table, options.columns) for split, table in tables.items()}
    chunks = {split: frame_chunks(table, columns[split], rules, split) for split, table in tables.items()}
    triples = ingest(chunks, maps, columns[TRAIN], granularity=options.time_granularity)
    return Reading(triples, columns=columns[TRAIN], place=row_place)


def _columns(table: Any, columns: Columns) -> Columns:
    """Return the columns of a frame; without names of the user, those of head, relation and tail."""
    known = [str(name) for name in (table.column_names if isinstance(table, pa.Table) else table.columns)]
    if columns.names or set(columns.order) <= set(known):
        return columns
    # Numbers are the names of a file that was read without a header.
    by_place = known == [str(place) for place in range(len(columns.order))]
    names = dict(zip(columns.order, known)) if by_place else columns_of_header(known, columns)
    return replace(columns, names=names)


def _table(source: Any, split: str, options: Options) -> Any:
    """Return a source as a frame of pandas or Arrow, or as numbered triples."""
    if isinstance(source, pa.Table):
        return _decoded(source)
    if isinstance(source, pd.DataFrame):
        are_texts = all(isinstance(name, str) for name in source.columns)
        return source if are_texts else source.set_axis([*map(str, source.columns)], axis=1)
    if hasattr(source, "mapped_triples"):
        return _read_factory(source)
    if hasattr(source, "canonical_etypes"):
        return numbered_graph(source, options, split)
    if hasattr(source, "edge_types") and hasattr(source, "edge_index_dict"):
        edges = {edge_type: as_array(source[edge_type].edge_index) for edge_type in source.edge_types}
        counts = {node_type: source[node_type].num_nodes for node_type in source.node_types}
        return numbered_edges(edges, counts)
    if hasattr(source, "is_multigraph") and hasattr(source, "edges"):
        return _read_networkx(source, options)
    if hasattr(source, "collect") and hasattr(source, "lazy"):
        source = source.collect()
    if hasattr(source, "__arrow_c_stream__"):
        return _decoded(pa.table(source))
    if hasattr(source, "to_pandas"):
        return source.to_pandas()
    if isinstance(source, Mapping):
        return pd.DataFrame(dict(source))
    if hasattr(source, "__array__"):
        return _read_array(as_array(source), split, options)
    check_kind(source, split)
    return _read_rows(source, split, options)


def _decoded(table: pa.Table) -> pa.Table:
    """Return a table with plain columns in place of dictionaries, which Arrow cannot cast from all types."""
    for place, column in enumerate(table.columns):
        if pa.types.is_dictionary(column.type):
            chunks = [chunk.dictionary.cast(pa.string()).take(chunk.indices) for chunk in column.chunks]
            table = table.set_column(place, table.column_names[place], pa.chunked_array(chunks, pa.string()))
    return table


def _read_rows(source: Iterable[Any], split: str, options: Options) -> Any:
    # The order of a set of names differs between processes.
    rows = sorted(source, key=str) if isinstance(source, Set) else list(source)
    if rows and isinstance(rows[0], Mapping):
        return pd.DataFrame(rows)
    order = options.columns.order
    for place, row in enumerate(rows):
        if isinstance(row, (str, bytes)) or not hasattr(row, "__len__") or len(row) != len(order):
            raise InputError(f"{row_place(split, place)} is {str(row)[:80]!r}, expected {', '.join(order)}")
    are_ids = all(isinstance(value, (int, np.integer)) for row in rows for value in row)
    if rows and are_ids and len(order) == len(ROLES):
        return _read_array(np.array(rows, np.int64), split, options)
    with os_errors(InputError, f"{split} has names that are not text", UnicodeEncodeError):
        return pd.DataFrame([tuple(row) for row in rows], columns=list(order))


def _read_array(array: np.ndarray, split: str, options: Options) -> Any:
    if array.dtype.names:
        return pd.DataFrame(array)
    order = options.columns.order
    if array.ndim != 2 or array.shape[1] != len(order):
        expected = f"expected (n, {len(order)}): {', '.join(order)}"
        raise InputError(f"{split} is an array of shape {array.shape}, {expected}")
    if array.dtype.kind not in "iu" or len(order) > len(ROLES):
        if array.dtype.kind == "f" and len(order) == len(ROLES):
            raise InputError(f"{split} is an array of {array.dtype}, expected integer ids or names")
        return pd.DataFrame(array, columns=list(order))
    return Numbered(array[:, [order.index(role) for role in ROLES]])


def _read_factory(factory: Any) -> Numbered:
    """Return the triples of a factory of PyKEEN; one without labels has their numbers alone."""
    names = []
    for noun, num in (("entity", factory.num_entities), ("relation", factory.num_relations)):
        labels = numbers(num)
        for label, number in (getattr(factory, f"{noun}_to_id", None) or {}).items():
            labels[number] = str(label)
        names.append(labels)
    return Numbered(as_array(factory.mapped_triples), names[0], names[1])


def _read_networkx(graph: Any, options: Options) -> pd.DataFrame:
    """Return the edges of a graph of NetworkX, whose relation is an attribute or a key."""
    attribute = options.reading.relation_attribute
    attributes = RELATION_ATTRIBUTES if attribute is None else (attribute,)
    is_keyed = attribute is None and graph.is_multigraph()
    rows = []
    for head, tail, *key, data in graph.edges(data=True, **({"keys": True} if is_keyed else {})):
        relations = [data[name] for name in attributes if data.get(name) is not None]
        if not relations and attribute is not None:
            raise InputError(f"the edge from {head!r} to {tail!r} has no attribute {attribute!r}")
        relations += [*filter(lambda name: isinstance(name, str), key), NO_RELATION]
        rows.append((str(head), str(relations[0]), str(tail)))
    return pd.DataFrame(rows, columns=list(ROLES))
