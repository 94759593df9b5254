"""Exports for search and display of vectors: faiss, LanceDB, Qdrant and TensorBoard's projector."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

import numpy as np

from dglkge.errors import InputError, JobError, import_extra, require_known
from dglkge.inference.exports.files import (
    Export,
    ExportedTable,
    Ids,
    Output,
    each_table,
    file_output,
    number_texts,
    record_batches,
    table_schema,
    text_output,
)
from dglkge.model.functions.comparators import COSINE, INNER_PRODUCT, METRICS
from dglkge.model.score_functions import SCORE_FUNCTIONS

PROJECTOR_ROWS = 10_000
"""Rows of a table that the projector shows by default: a browser computes t-SNE of them."""

PROJECTOR_CONFIG = "projector_config.pbtxt"

FAISS_COUNT = struct.Struct("<q")
FAISS_COUNT_OFFSET = 8
"""Place of the number of vectors in a file of faiss: after four letters and the dimension."""


def plan_faiss(export: Export) -> Iterable[Output]:
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


def plan_lancedb(export: Export) -> list[Output]:
    """Plan a table of a LanceDB database for each table; the folder is the database."""
    lancedb = import_extra("the format lancedb", "lancedb", "lancedb")
    return [Output(f"{table.name}.lance", partial(_write_lance, table, lancedb)) for table in export.tables]


def _write_lance(table: ExportedTable, lancedb: ModuleType, temporary: Path) -> None:
    schema = table_schema(table, "vector")  # the column that LanceDB searches if no other is named
    # LanceDB writes tables under their own names only, so into a database of its own at first.
    with tempfile.TemporaryDirectory(prefix=".lancedb-", dir=temporary.parent) as scratch:
        try:
            lancedb.connect(scratch).create_table(
                table.name, data=record_batches(table, schema), schema=schema
            )
        except ValueError as error:
            raise InputError(f"LanceDB refuses the table {table.name!r}: {error}") from None
        os.replace(Path(scratch) / f"{table.name}.lance", temporary)


def plan_qdrant(export: Export) -> list[Output]:
    """Plan a folder of Qdrant's local mode with a collection for each table."""
    metric = _metric(export)
    qdrant = import_extra("the format qdrant", "qdrant_client", "qdrant", "qdrant-client")
    return [Output("qdrant", partial(_write_qdrant, export.tables, metric, qdrant))]


def _write_qdrant(tables: Sequence[ExportedTable], metric: str, qdrant: ModuleType, temporary: Path) -> None:
    """Write points whose ids are those of the data set."""
    distances = {INNER_PRODUCT: qdrant.models.Distance.DOT, COSINE: qdrant.models.Distance.COSINE}
    distance = distances.get(metric, qdrant.models.Distance.EUCLID)
    client = qdrant.QdrantClient(path=str(temporary))
    try:
        for table in tables:
            vectors = qdrant.models.VectorParams(size=table.shape[1], distance=distance)
            client.create_collection(table.name, vectors_config=vectors)
            start = 0
            for names, rows in table.blocks():
                client.upload_collection(
                    table.name,
                    vectors=rows,
                    payload=[{"name": name, "type": table.name} for name in names],
                    ids=range(start, start + len(names)),
                )
                start += len(names)
    finally:
        client.close()


def plan_projector(export: Export) -> list[Output]:
    """Plan the files of TensorBoard's projector: rows, names and the configuration that names both."""
    most = PROJECTOR_ROWS if export.max_rows is None else export.max_rows
    if most < 1:
        raise InputError(f"--max-rows must be at least 1, got {most}")
    outputs, config = [], ""
    for table in export.tables:
        ids: Ids = table.ids
        if len(ids) > most:  # always the same sample
            ids = np.sort(np.random.default_rng(0).choice(len(ids), most, replace=False))
        tensors, metadata = f"{table.name}.tensors.tsv", f"{table.name}.metadata.tsv"
        outputs += [file_output(tensors, partial(_write_tensors, table, ids))]
        outputs += [file_output(metadata, partial(_write_metadata, table, ids))]
        fields = {"tensor_name": table.name, "tensor_path": tensors, "metadata_path": metadata}
        # Texts of protobuf's text format have the escapes of JSON's.
        lines = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in fields.items())
        config += f"embeddings {{\n{lines}}}\n"
    return [*outputs, text_output(PROJECTOR_CONFIG, config)]


def _write_tensors(table: ExportedTable, ids: Ids, file: BinaryIO) -> None:
    for _, rows in table.blocks(ids=ids):
        file.writelines(f"{text}\n".encode() for text in number_texts(rows, "\t"))


def _write_metadata(table: ExportedTable, ids: Ids, file: BinaryIO) -> None:
    """Write names and types; with more than one column the projector expects a line of their titles."""
    file.write(b"name\ttype\n")
    file.writelines(f"{table.names[id_]}\t{table.name}\n".encode() for id_ in ids)
