"""Export of a trained model's rows to formats that other programs read.

Those of files of rows, of DGL-KE and the hub, and those for search and display: faiss, LanceDB, Qdrant and
TensorBoard's projector.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dglkge.data.vector_files import word2vec_name
from dglkge.errors import InputError, JobError, import_extra, require_known
from dglkge.formats.operators import DGLKE_MATRICES
from dglkge.inference.exports import dglke_files, files
from dglkge.inference.exports.files import LINE_ENDS, Export, ExportedTable, Ids, Output, Planner, each_table
from dglkge.inference.exports.hub import plan_huggingface
from dglkge.inference.whole_tables import Tables
from dglkge.model.functions.comparators import COSINE, INNER_PRODUCT, METRICS
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import RELATION

SAFETENSORS_NAME = "embeddings"

PROJECTOR_ROWS = 10_000
"""Rows of a table that the projector shows by default: a browser computes t-SNE of them."""

PROJECTOR_CONFIG = "projector_config.pbtxt"

FAISS_COUNT = struct.Struct("<q")
FAISS_COUNT_OFFSET = 8
"""Place of the number of vectors in a file of faiss: after four letters and the dimension."""


def export_tables(
    source: Tables, tables: Sequence[str], file_format: str, folder: Path, overwrite: bool, **options: Any
) -> list[Path]:
    """Write tables to a folder, rows in the order of original ids.

    Parameters
    ----------
    tables : sequence of str
        Entity types, or ``"relation"``.
    file_format : str
        ``"npy"``: ``{table}.npy`` (n, D) float32 and ``{table}.names.txt``, one name for each row.
        ``"tsv"``: ``{table}.tsv``, a name and its D numbers on each line, separated by tabs.
        ``"word2vec"``: ``{table}.vec``, a line with n and D, then lines as in tsv separated by spaces;
        white space in names becomes ``_``.
        ``"parquet"``: columns ``name``, ``type`` (the table) and ``embedding`` (a list of D float32).
        ``"safetensors"``: one tensor ``embeddings`` (n, D), and names as for npy.
        ``"dglke"``: ``{dataset}_{model}_entity.npy`` and ``..._relation.npy``, the id maps ``entities.tsv``
        and ``relations.tsv``, and ``config.json``; RotatE's phases are scaled as in DGL-KE, and TransR's
        matrices are in ``..._projection.npy``.
        ``"faiss"``: ``{table}.faiss``, an exact index, and names as for npy; needs the package faiss.
        ``"lancedb"``: ``{table}.lance``, so that the folder is a LanceDB database with a table ``{table}``
        of columns ``name``, ``type`` and ``vector``; needs the package lancedb.
        ``"qdrant"``: ``qdrant/``, a folder of Qdrant's local mode with a collection for each table, points
        with the ids of the data set and payload ``name`` and ``type``; needs the package qdrant-client.
        ``"projector"``: ``{table}.tensors.tsv``, ``{table}.metadata.tsv`` and ``projector_config.pbtxt``:
        a log folder of TensorBoard.
        ``"huggingface"``: a folder for the Hugging Face hub, which
        :func:`dglkge.inference.run.open_run` opens too, see :mod:`dglkge.inference.exports.hub`.
        Numbers in text have nine digits, which restore the same float32.
    folder : Path
        Created if absent.
    overwrite : bool
        Whether existing files may be replaced.
    max_rows : int, optional
        For ``"projector"``: most rows of a table; see
        :data:`dglkge.inference.exports.export.PROJECTOR_ROWS`.
    metric : str, optional
        For ``"faiss"`` and ``"qdrant"``: one of :data:`dglkge.model.functions.comparators.METRICS` instead
        of the score function's.
    metrics : mapping, optional
        For ``"huggingface"``: ranking results by name, for the model card.

    Returns
    -------
    list of Path
        The files. They appear under their names only when all are complete.
    """
    require_known("format", file_format, FORMATS)
    if RELATION in tables and (times := len(source.meta.times)):
        raise InputError(f"{source.path} has relations at {times} times, of which no format has rows")
    for option, *owners in (("max_rows", "projector"), ("metric", "faiss", "qdrant")):
        if options.get(option) is not None and file_format not in owners:
            name, formats = option.replace("_", "-"), " or ".join(owners)
            raise InputError(f"--{name} goes with --format {formats}, got --format {file_format}")
    # A damaged or unknown table, or a name that the format cannot hold, is an error before anything is
    # written.
    opened = [ExportedTable.of(source, table) for table in dict.fromkeys(tables)]
    plan, separators = FORMATS[file_format]
    files.check_names(opened, separators, file_format)
    outputs = list(plan(Export(source, opened, **options)))
    return files.write_outputs(outputs, folder, overwrite)


def number_texts(rows: np.ndarray, separator: str) -> Iterator[str]:
    """Return the numbers of each row as text."""
    # Nine significant digits identify a float32. One format for a whole row is faster than one for a number.
    pattern = separator.join(["%.9g"] * rows.shape[1])
    return (pattern % tuple(row) for row in rows.tolist())


def table_schema(table: ExportedTable, column: str) -> pa.Schema:
    """Return the columns of :func:`record_batches`; readers see lists of fixed length as a matrix."""
    texts = [("name", pa.string()), ("type", pa.string())]
    return pa.schema([*texts, (column, pa.list_(pa.float32(), table.shape[1]))])


def record_batches(table: ExportedTable, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the blocks of a table with three columns: the names, the table's own name, the rows."""
    for names, rows in table.blocks():
        flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
        lists = pa.FixedSizeListArray.from_arrays(flat, table.shape[1]).cast(schema.types[2])
        types = pa.array([table.name] * len(names), pa.string())
        yield pa.record_batch([pa.array(names, pa.string()), types, lists], schema=schema)


def _plan_dglke(export: Export) -> Iterator[Output]:
    """Plan DGL-KE's files."""
    meta = export.source.meta
    config = dglke_files.dglke_config(meta)
    stem = f"{config['dataset']}_{config['model_name']}_"
    matrices = DGLKE_MATRICES.get(meta.score_function, "")
    for table in export.tables:
        # All its entities have one type.
        name = RELATION if table.name == RELATION else dglke_files.ENTITY
        is_rotation = name == RELATION and config["model_name"] == "RotatE"
        scale = dglke_files.phase_scale(config["gamma"], config["hidden_dim"]) if is_rotation else 1.0
        width = table.shape[1]
        # DGL-KE has the numbers of a relation's row after the first D in a file of their own.
        cut = meta.dim if matrices and name == RELATION else width
        for piece, columns in ((name, slice(0, cut)), (matrices, slice(cut, width))):
            if columns.start < columns.stop:
                write = partial(_write_npy, table, columns=columns, scale=scale)
                yield files.file_output(f"{stem}{piece}.npy", write)
        write_map = partial(dglke_files.write_id_map, table.names)
        yield files.file_output(config[dglke_files.MAP_KEYS[name]], write_map)
    yield files.text_output(dglke_files.CONFIG, json.dumps(config, indent=4) + "\n")


def _write_npy(table: ExportedTable, file: BinaryIO, columns: slice | None = None, scale: float = 1) -> None:
    columns = columns or slice(0, table.shape[1])
    # The header alone, as np.save would need the whole array in memory.
    shape = (table.shape[0], columns.stop - columns.start)
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    files.write_rows(file, table.blocks(columns, scale))


def _write_parquet(table: ExportedTable, file: BinaryIO) -> None:
    """Write a row group for each block: readers and this writer hold one group at a time."""
    schema = table_schema(table, "embedding")
    # Dictionaries and statistics of the numbers would cost time and space, and no reader uses them.
    options = {"use_dictionary": ["type"], "write_statistics": ["name", "type"]}
    with pq.ParquetWriter(file, schema, **options) as writer:
        for batch in record_batches(table, schema):
            writer.write_batch(batch)


def _write_safetensors(table: ExportedTable, file: BinaryIO) -> None:
    files.write_safetensors(file, {SAFETENSORS_NAME: table})


def _plan_word2vec(export: Export) -> Iterable[Output]:
    """Plan word2vec text files; refuse names that are equal once their white space is replaced."""
    for table in export.tables:
        changed = [name for name in table.names if word2vec_name(name) != name]
        names = set(table.names) if changed else set()
        for name in changed:
            if word2vec_name(name) in names:
                raise InputError(
                    f"the name {name!r} of table {table.name!r} becomes {word2vec_name(name)!r} in "
                    "the format word2vec, as another one does; parquet and lancedb hold any name"
                )
            names.add(word2vec_name(name))
    return each_table(".vec", partial(_write_text, " "))(export)


def _write_text(separator: str, table: ExportedTable, file: BinaryIO) -> None:
    """Write a name and its numbers on each line; by spaces as word2vec, with a line of both counts."""
    is_word2vec = separator == " "
    if is_word2vec:
        file.write(f"{table.shape[0]} {table.shape[1]}\n".encode())
    for names, rows in table.blocks():
        lines = zip(map(word2vec_name, names) if is_word2vec else names, number_texts(rows, separator))
        file.writelines(f"{name}{separator}{numbers}\n".encode() for name, numbers in lines)


def _plan_faiss(export: Export) -> Iterable[Output]:
    """Plan an exact index and a file of names for each table."""
    metric = _metric(export)
    faiss = import_extra("the format faiss", "faiss", "faiss", "faiss-cpu")
    return each_table(".faiss", partial(_write_faiss, metric, faiss), with_names=True)(export)


def _metric(export: Export) -> str:
    """Return the metric of an index: the one asked for, or the score function's."""
    metric = export.metric or SCORE_FUNCTIONS.get(export.source.meta.score_function).metric
    require_known("metric", metric, METRICS)
    return metric


def _write_faiss(metric: str, faiss: ModuleType, table: ExportedTable, file: BinaryIO) -> None:
    """Write an IndexFlat a block at a time: faiss itself would hold the table in memory, twice as it grows.

    faiss writes an index of one row. Its header is that of any number of rows but for two counts: of rows,
    and of all their numbers, which stands before them.
    """
    num_rows, width = table.shape
    # faiss has no cosine: it is the inner product of rows of length 1.
    kind = faiss.METRIC_L2 if metric not in (INNER_PRODUCT, COSINE) else faiss.METRIC_INNER_PRODUCT
    index = faiss.IndexFlat(width, kind)
    index.add(np.zeros((1, width), np.float32))
    header = bytearray(faiss.serialize_index(index).tobytes()[: -4 * width])
    places = {FAISS_COUNT_OFFSET: (1, num_rows), len(header) - FAISS_COUNT.size: (width, num_rows * width)}
    for place, (expected_count, count) in places.items():
        if FAISS_COUNT.unpack_from(header, place) != (expected_count,):
            raise JobError(f"faiss {faiss.__version__} writes an index in a form that is not known here")
        FAISS_COUNT.pack_into(header, place, count)
    file.write(header)
    for _, rows in table.blocks():
        block = np.ascontiguousarray(rows, dtype=np.float32)
        if metric == COSINE:
            faiss.normalize_L2(block)
        file.write(block.tobytes())


def _plan_lancedb(export: Export) -> list[Output]:
    """Plan a table of a LanceDB database for each table; the folder is the database."""
    lancedb = import_extra("the format lancedb", "lancedb", "lancedb")
    return [Output(f"{table.name}.lance", partial(_write_lance, table, lancedb)) for table in export.tables]


def _write_lance(table: ExportedTable, lancedb: ModuleType, path: Path) -> None:
    schema = table_schema(table, "vector")  # the column that LanceDB searches if no other is named
    data = record_batches(table, schema)
    try:
        # The file's name is the one that LanceDB gives to the table.
        lancedb.connect(path.parent).create_table(table.name, data=data, schema=schema)
    except ValueError as error:
        raise InputError(f"LanceDB refuses the table {table.name!r}: {error}") from None


def _plan_qdrant(export: Export) -> list[Output]:
    """Plan a folder of Qdrant's local mode with a collection for each table."""
    metric = _metric(export)
    qdrant = import_extra("the format qdrant", "qdrant_client", "qdrant", "qdrant-client")
    return [Output("qdrant", partial(_write_qdrant, export.tables, metric, qdrant))]


def _write_qdrant(tables: Sequence[ExportedTable], metric: str, qdrant: ModuleType, temporary: Path) -> None:
    """Write points whose ids are those of the data set."""
    distances = {INNER_PRODUCT: qdrant.models.Distance.DOT, COSINE: qdrant.models.Distance.COSINE}
    distance = distances.get(metric, qdrant.models.Distance.EUCLID)
    with contextlib.closing(qdrant.QdrantClient(path=str(temporary))) as client:
        for table in tables:
            vectors = qdrant.models.VectorParams(size=table.shape[1], distance=distance)
            client.create_collection(table.name, vectors_config=vectors)
            start = 0
            for names, rows in table.blocks():
                payload = [{"name": name, "type": table.name} for name in names]
                ids = range(start, start + len(names))
                client.upload_collection(table.name, vectors=rows, payload=payload, ids=ids)
                start += len(names)


def _plan_projector(export: Export) -> list[Output]:
    """Plan the files of TensorBoard's projector: rows, names and the configuration that names both."""
    most = PROJECTOR_ROWS if export.max_rows is None else export.max_rows
    if most < 1:
        raise InputError(f"--max-rows must be at least 1, got {most}")
    outputs, config = [], ""
    for table in export.tables:
        ids: Ids = range(table.shape[0])
        if len(ids) > most:  # always the same sample
            ids = np.sort(np.random.default_rng(0).choice(len(ids), most, replace=False))
        tensors, metadata = f"{table.name}.tensors.tsv", f"{table.name}.metadata.tsv"
        outputs += [files.file_output(tensors, partial(_write_tensors, table, ids))]
        outputs += [files.file_output(metadata, partial(_write_metadata, table, ids))]
        fields = {"tensor_name": table.name, "tensor_path": tensors, "metadata_path": metadata}
        # Texts of protobuf's text format have the escapes of JSON's.
        lines = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in fields.items())
        config += f"embeddings {{\n{lines}}}\n"
    return [*outputs, files.text_output(PROJECTOR_CONFIG, config)]


def _write_tensors(table: ExportedTable, ids: Ids, file: BinaryIO) -> None:
    for _, rows in table.blocks(ids=ids):
        file.writelines(f"{text}\n".encode() for text in number_texts(rows, "\t"))


def _write_metadata(table: ExportedTable, ids: Ids, file: BinaryIO) -> None:
    """Write names and types; with more than one column the projector expects a line of their titles."""
    file.write(b"name\ttype\n")
    file.writelines(f"{table.names[id_]}\t{table.name}\n".encode() for id_ in ids)


FIELD_ENDS = LINE_ENDS + "\t"
FORMATS: dict[str, tuple[Planner, str]] = {
    "dglke": (_plan_dglke, FIELD_ENDS),
    "faiss": (_plan_faiss, LINE_ENDS),
    "huggingface": (plan_huggingface, LINE_ENDS),
    "lancedb": (_plan_lancedb, ""),
    "npy": (each_table(".npy", _write_npy, with_names=True), LINE_ENDS),
    "parquet": (each_table(".parquet", _write_parquet), ""),
    "projector": (_plan_projector, FIELD_ENDS),
    "qdrant": (_plan_qdrant, ""),
    "safetensors": (each_table(".safetensors", _write_safetensors, with_names=True), LINE_ENDS),
    "tsv": (each_table(".tsv", partial(_write_text, "\t")), FIELD_ENDS),
    "word2vec": (_plan_word2vec, ""),
}
"""Format to the function that plans its files, and to the characters that no name may have: they separate the
fields or lines of the format."""
