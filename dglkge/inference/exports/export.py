"""Export of a trained model's rows to formats that other programs read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow.parquet as pq

from dglkge.data.vector_files import word2vec_name
from dglkge.errors import InputError, require_known
from dglkge.formats.operators import DGLKE_MATRICES
from dglkge.inference.exports import dglke_files
from dglkge.inference.exports.files import (
    LINE_ENDS,
    Export,
    ExportedTable,
    Output,
    Planner,
    check_names,
    each_table,
    file_output,
    number_texts,
    record_batches,
    table_schema,
    text_output,
    write_outputs,
    write_rows,
    write_safetensors,
)
from dglkge.inference.exports.hub import plan_huggingface
from dglkge.inference.exports.vectors import plan_faiss, plan_lancedb, plan_projector, plan_qdrant
from dglkge.inference.whole_tables import Tables
from dglkge.typing import RELATION

SAFETENSORS_NAME = "embeddings"


def export_tables(
    source: Tables,
    tables: Sequence[str],
    file_format: str,
    folder: Path,
    overwrite: bool,
    max_rows: int | None = None,
    metric: str | None = None,
    metrics: Mapping[str, Any] | None = None,
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
        :data:`dglkge.inference.exports.vectors.PROJECTOR_ROWS`.
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
    if RELATION in tables and source.meta.times:
        raise InputError(
            f"{source.path} has relations at {len(source.meta.times)} times, of which no format has rows; "
            "allowed: tables of entity types"
        )
    for option, value, *owners in (
        ("max-rows", max_rows, "projector"),
        ("metric", metric, "faiss", "qdrant"),
    ):
        if value is not None and file_format not in owners:
            raise InputError(
                f"--{option} goes with --format {' or '.join(owners)}, got --format {file_format}"
            )
    if file_format == "dglke":
        dglke_files.dglke_config(source.meta)  # refuses a model that DGL-KE lacks, before rows are read
    # A damaged or unknown table, or a name that the format cannot hold, is an error before anything is
    # written.
    opened = [ExportedTable.of(source, table) for table in dict.fromkeys(tables)]
    plan, separators = FORMATS[file_format]
    check_names(opened, separators, file_format)
    outputs = list(plan(Export(source, opened, max_rows, metric, metrics or {})))
    return write_outputs(outputs, folder, overwrite)


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
                yield file_output(f"{stem}{piece}.npy", write)
        yield file_output(
            str(config[dglke_files.MAP_KEYS[name]]), partial(dglke_files.write_id_map, table.names)
        )
    yield text_output(dglke_files.CONFIG, json.dumps(config, indent=4) + "\n")


def _write_npy(
    table: ExportedTable, file: BinaryIO, columns: slice | None = None, scale: float = 1.0
) -> None:
    columns = columns or slice(0, table.shape[1])
    # The header alone, as np.save would need the whole array in memory.
    shape = (table.shape[0], columns.stop - columns.start)
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    write_rows(file, table.blocks(columns, scale))


def _write_parquet(table: ExportedTable, file: BinaryIO) -> None:
    """Write a row group for each block: readers and this writer hold one group at a time."""
    schema = table_schema(table, "embedding")
    # Dictionaries and statistics of the numbers would cost time and space, and no reader uses them.
    options = {"use_dictionary": ["type"], "write_statistics": ["name", "type"]}
    with pq.ParquetWriter(file, schema, **options) as writer:
        for batch in record_batches(table, schema):
            writer.write_batch(batch)


def _write_safetensors(table: ExportedTable, file: BinaryIO) -> None:
    write_safetensors(file, {SAFETENSORS_NAME: table})


def _write_tsv(table: ExportedTable, file: BinaryIO) -> None:
    for names, rows in table.blocks():
        _write_lines(file, rows, names, "\t")


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
    return each_table(".vec", _write_word2vec)(export)


def _write_word2vec(table: ExportedTable, file: BinaryIO) -> None:
    file.write(f"{table.shape[0]} {table.shape[1]}\n".encode())
    for names, rows in table.blocks():
        _write_lines(file, rows, [word2vec_name(name) for name in names], " ")


def _write_lines(file: BinaryIO, rows: np.ndarray, names: Sequence[str], separator: str) -> None:
    """Write a name and its numbers on each line."""
    lines = zip(names, number_texts(rows, separator))
    file.writelines(f"{name}{separator}{numbers}\n".encode() for name, numbers in lines)


FIELD_ENDS = LINE_ENDS + "\t"
FORMATS: dict[str, tuple[Planner, str]] = {
    "dglke": (_plan_dglke, FIELD_ENDS),
    "faiss": (plan_faiss, LINE_ENDS),
    "huggingface": (plan_huggingface, LINE_ENDS),
    "lancedb": (plan_lancedb, ""),
    "npy": (each_table(".npy", _write_npy, with_names=True), LINE_ENDS),
    "parquet": (each_table(".parquet", _write_parquet), ""),
    "projector": (plan_projector, FIELD_ENDS),
    "qdrant": (plan_qdrant, ""),
    "safetensors": (each_table(".safetensors", _write_safetensors, with_names=True), LINE_ENDS),
    "tsv": (each_table(".tsv", _write_tsv), FIELD_ENDS),
    "word2vec": (_plan_word2vec, ""),
}
"""Format to the function that plans its files, and to the characters that no name may have: they separate the
fields or lines of the format."""
