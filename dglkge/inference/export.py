"""Export of a trained model's rows to formats that other programs read."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.data.vector_files import word2vec_name
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError, StorageError, unknown_name, write_error
from dglkge.inference import dglke_files
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import RELATION

ROWS_AT_A_TIME = 8192
"""Rows read and written at a time: the memory of an export does not grow with the table."""

PROGRESS_FROM_ROWS = 200_000

SAFETENSORS_NAME = "embeddings"

Shape = tuple[int, int]
Blocks = Iterable[tuple[Sequence[str], np.ndarray]]
Writer = Callable[[BinaryIO, Shape, Blocks], None]


def export_tables(
    source: dglke_files.Tables, tables: Sequence[str], file_format: str, folder: Path, overwrite: bool
) -> list[Path]:
    """Write tables to a folder, rows in the order of original ids.

    Parameters
    ----------
    source : Checkpoint or DglkeTables
    tables : sequence of str
        Entity types, or ``"relation"``.
    file_format : str
        ``"npy"``: ``{table}.npy`` (n, D) float32 and ``{table}.names.txt``, one name for each row.
        ``"tsv"``: ``{table}.tsv``, a name and its D numbers on each line, separated by tabs.
        ``"word2vec"``: ``{table}.vec``, a line with n and D, then lines as in tsv separated by spaces;
        white space in names becomes ``_``.
        ``"parquet"``: columns ``name`` and ``embedding`` (a list of D float32).
        ``"safetensors"``: one tensor ``embeddings`` (n, D), and names as for npy.
        ``"dglke"``: ``{dataset}_{model}_entity.npy`` and ``..._relation.npy``, the id maps ``entities.tsv``
        and ``relations.tsv``, and ``config.json``; RotatE's phases are scaled as in DGL-KE, and TransR's
        matrices are in ``..._projection.npy``.
        Numbers in text have nine digits, which restore the same float32.
    folder : Path
        Created if absent.
    overwrite : bool
        Whether existing files may be replaced.

    Returns
    -------
    list of Path
        The files. Each appears under its name only when it is complete.

    Raises
    ------
    InputError
        If the format or a table is unknown, a file exists, the folder cannot be written to, or DGL-KE has
        no such model.
    StorageError
        If the disk is full or fails.
    """
    if file_format not in FORMATS:
        raise unknown_name("format", file_format, FORMATS)
    suffix, write = FORMATS[file_format]
    dglke = dglke_files.dglke_config(source.meta) if file_format == "dglke" else None
    targets = {table: folder / f"{_stem(table, dglke)}{suffix}" for table in tables}
    matrices = _matrix_file(folder, source.meta, dglke) if RELATION in tables else None
    beside = {table: folder / _names_file(table, dglke) for table in tables if file_format in WITHOUT_NAMES}
    # All names are known and checked before the first file is written.
    config_file = folder / dglke_files.CONFIG
    # Refused before writing, so that a mistake never leaves a half-replaced export.
    more = [matrices] if matrices else []
    existing = [path for path in (*targets.values(), *beside.values(), *more) if path.exists()]
    existing += [config_file] if dglke and config_file.exists() else []
    if existing and not overwrite:
        raise InputError(f"{existing[0]} exists; allow it to be replaced, or take another folder")
    for table in tables:
        source[table]  # a damaged or unknown table is an error before anything is written
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for table, target in targets.items():
            names = source.relations.labels if table == RELATION else source.vocabulary(table)
            scale = _phase_scale(dglke) if table == RELATION else 1.0
            width = source[table].shape[1]
            # DGL-KE has the numbers of a relation's row after the first D in a file of their own.
            cut = source.meta.dim if matrices and table == RELATION else width
            pieces = [(target, slice(0, cut)), *((path, slice(cut, width)) for path in more if cut < width)]
            for path, columns in pieces:
                with _whole_file(path) as file:
                    shape = (len(source[table]), columns.stop - columns.start)
                    write(file, shape, _blocks(source, table, names, scale, columns))
                written.append(path)
            if table in beside:
                lines = dglke_files.id_map_lines(names.names) if dglke else _name_lines(names)
                written.append(_write_lines_file(lines, beside[table]))
        if dglke:
            written.append(_write_lines_file([dglke_files.config_bytes(dglke)], config_file))
    except OSError as error:
        problem = write_error(f"cannot write to {folder}", error)
        raise (problem if isinstance(problem, StorageError) else InputError(str(problem))) from error
    return written


def _stem(table: str, dglke: dict[str, Any] | None) -> str:
    """Return the name of a table's file, without its suffix."""
    if dglke is None:
        return table
    return f"{dglke['dataset']}_{dglke['model_name']}_{_dglke_table(table)}"


def _names_file(table: str, dglke: dict[str, Any] | None) -> str:
    """Return the name of the file that holds the names of a table's rows."""
    if dglke is None:
        return f"{table}.names.txt"
    return str(dglke[dglke_files.MAP_KEYS[_dglke_table(table)]])


def _dglke_table(table: str) -> str:
    """Return DGL-KE's name of a table; all its entities have one type."""
    return RELATION if table == RELATION else dglke_files.ENTITY


def _phase_scale(dglke: dict[str, Any] | None) -> float:
    """Return the factor of relation rows: DGL-KE scales RotatE's phases."""
    if dglke is None or dglke["model_name"] != "RotatE":
        return 1.0
    return dglke_files.phase_scale(dglke["gamma"], dglke["hidden_dim"])


def _matrix_file(folder: Path, meta: CheckpointMeta, dglke: dict[str, Any] | None) -> Path | None:
    """Return DGL-KE's file of the relations' matrices; None where there is none."""
    name = SCORE_FUNCTIONS.get(meta.score_function).dglke_matrices if dglke else ""
    return folder / f"{dglke['dataset']}_{dglke['model_name']}_{name}.npy" if dglke and name else None


def _blocks(
    source: dglke_files.Tables, table: str, names: Vocabulary, scale: float, columns: slice
) -> Iterator[tuple[Sequence[str], np.ndarray]]:
    """Yield (names, rows) in the order of ids, with a progress bar for large tables."""
    count = len(source[table])
    with tqdm(total=count, desc=table, unit="row", disable=count < PROGRESS_FROM_ROWS or None) as bar:
        for start in range(0, count, ROWS_AT_A_TIME):
            ids = torch.arange(start, min(count, start + ROWS_AT_A_TIME))
            # Shards hold rows in their own order; gather gives the order of ids, a block at a time.
            rows = source.gather(table, ids).numpy()[:, columns]
            if scale != 1.0:
                # In float64, as the import divides: there and back costs one rounding.
                rows = (rows.astype(np.float64) * scale).astype(np.float32)
            yield names.names[start : start + len(ids)], rows
            bar.update(len(ids))


@contextlib.contextmanager
def _whole_file(target: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that is renamed to the target once it is complete."""
    temporary = target.with_name(target.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _name_lines(names: Vocabulary) -> Iterator[bytes]:
    return (f"{name}\n".encode() for name in names.names)


def _write_lines_file(lines: Iterable[bytes], target: Path) -> Path:
    with _whole_file(target) as file:
        file.writelines(lines)
    return target


def _write_npy(file: BinaryIO, shape: Shape, blocks: Blocks) -> None:
    # The header alone, as np.save would need the whole array in memory.
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    _write_raw(file, blocks)


def _write_safetensors(file: BinaryIO, shape: Shape, blocks: Blocks) -> None:
    """Write one tensor; the format: https://huggingface.co/docs/safetensors."""
    tensor = {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 4 * shape[0] * shape[1]]}
    header = json.dumps({SAFETENSORS_NAME: tensor}).encode()
    header += b" " * (-len(header) % 8)  # the tensor begins at a multiple of 8 bytes
    file.write(struct.pack("<Q", len(header)) + header)
    _write_raw(file, blocks)


def _write_raw(file: BinaryIO, blocks: Blocks) -> None:
    for _, rows in blocks:
        file.write(np.ascontiguousarray(rows, dtype="<f4").tobytes())


def _write_parquet(file: BinaryIO, shape: Shape, blocks: Blocks) -> None:
    # Lists of fixed length: readers get a matrix without offsets.
    rows_type = pa.list_(pa.float32(), shape[1])
    schema = pa.schema([("name", pa.string()), ("embedding", rows_type)])
    with pq.ParquetWriter(file, schema) as writer:
        for names, rows in blocks:
            flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
            lists = pa.FixedSizeListArray.from_arrays(flat, shape[1])
            writer.write_table(pa.table([pa.array(names, pa.string()), lists.cast(rows_type)], schema=schema))


def _write_tsv(file: BinaryIO, shape: Shape, blocks: Blocks) -> None:
    for names, rows in blocks:
        _write_lines(file, rows, names, "\t")


def _write_word2vec(file: BinaryIO, shape: Shape, blocks: Blocks) -> None:
    file.write(f"{shape[0]} {shape[1]}\n".encode())
    for names, rows in blocks:
        _write_lines(file, rows, [word2vec_name(name) for name in names], " ")


def _write_lines(file: BinaryIO, rows: np.ndarray, names: Sequence[str], separator: str) -> None:
    """Write a name and its numbers on each line."""
    # Nine significant digits identify a float32. One format for a whole row is faster than one for a number.
    numbers = separator.join(["%.9g"] * rows.shape[1])
    for name, row in zip(names, rows.tolist()):
        file.write(f"{name}{separator}{numbers % tuple(row)}\n".encode())


FORMATS: dict[str, tuple[str, Writer]] = {
    "dglke": (".npy", _write_npy),
    "npy": (".npy", _write_npy),
    "parquet": (".parquet", _write_parquet),
    "safetensors": (".safetensors", _write_safetensors),
    "tsv": (".tsv", _write_tsv),
    "word2vec": (".vec", _write_word2vec),
}
"""Format to the suffix of its files and the function that writes one."""

WITHOUT_NAMES = ("npy", "safetensors", "dglke")
"""Formats whose files of rows have no names; they go to a file of their own."""
