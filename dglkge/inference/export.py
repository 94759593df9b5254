"""A checkpoint's rows in formats that other programs read."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from dglkge.checkpoint.reader import Checkpoint
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError, unknown_name
from dglkge.typing import RELATION

ROWS_AT_A_TIME = 8192
PROGRESS_FROM_ROWS = 200_000

SAFETENSORS_NAME = "embeddings"
DGLKE_MODELS = {
    "transe_l1": "TransE_l1",
    "transe_l2": "TransE_l2",
    "distmult": "DistMult",
    "complex": "ComplEx",
}
"""DGL-KE's names of the models whose rows are laid out as ours; its RotatE scales the phases."""

Shape = tuple[int, int]
Blocks = Iterable[tuple[Sequence[str], np.ndarray]]
Writer = Callable[[BinaryIO, Shape, Blocks], None]


def export_tables(
    checkpoint: Checkpoint, tables: Sequence[str], file_format: str, folder: Path, overwrite: bool
) -> list[Path]:
    """Write tables to a folder, rows in the order of original ids.

    Parameters
    ----------
    checkpoint : Checkpoint
    tables : sequence of str
        Entity types, or ``"relation"``.
    file_format : str
        ``"npy"``: ``{table}.npy`` (n, D) float32 and ``{table}.names.txt``, one name for each row.
        ``"tsv"``: ``{table}.tsv``, a name and its D numbers on each line, separated by tabs.
        ``"word2vec"``: ``{table}.vec``, a line with n and D, then lines as in tsv separated by spaces;
        white space in names becomes ``_``.
        ``"parquet"``: columns ``name`` and ``embedding`` (a list of D float32).
        ``"safetensors"``: one tensor ``embeddings`` (n, D), and names as for npy.
        ``"dglke"``: ``{dataset}_{model}_entity.npy`` and ``..._relation.npy``, and names as for npy.
        The numbers have nine digits, which brings back the same float32.
    folder : Path
        Made where it does not exist.
    overwrite : bool
        Whether files that exist may be replaced.

    Returns
    -------
    list of Path
        The files, each of which appears under its name only when it is whole.

    Raises
    ------
    InputError
        If the format or a table is unknown, a file exists, the folder cannot be written to, or DGL-KE has
        no such model.
    """
    if file_format not in FORMATS:
        raise unknown_name("format", file_format, FORMATS)
    suffix, write = FORMATS[file_format]
    stem = _dglke_stem(checkpoint) if file_format == "dglke" else ""
    targets = {table: folder / f"{stem}{table}{suffix}" for table in tables}
    existing = [target for target in targets.values() if target.exists()]
    if existing and not overwrite:
        raise InputError(f"{existing[0]} exists; allow it to be replaced, or take another folder")
    for table in tables:
        checkpoint[table]  # a damaged or unknown table is an error before anything is written
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for table, target in targets.items():
            names = checkpoint.relations.labels if table == RELATION else checkpoint.vocabulary(table)
            with _whole_file(target) as file:
                write(file, checkpoint[table].shape, _blocks(checkpoint, table, names))
            written.append(target)
            if file_format in WITHOUT_NAMES:
                written.append(_write_names(names, folder / f"{table}.names.txt"))
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from error
    return written


def _dglke_stem(checkpoint: Checkpoint) -> str:
    """Return the beginning of DGL-KE's file names.

    Raises
    ------
    InputError
        If DGL-KE has no such model.
    """
    meta = checkpoint.meta
    if meta.score_function not in DGLKE_MODELS or meta.reciprocal or list(meta.entity_types) != ["entity"]:
        raise InputError(
            f"DGL-KE has {', '.join(DGLKE_MODELS)} of one entity type, 'entity', no reciprocal relations; "
            f"got {meta.score_function}, {', '.join(meta.entity_types)}, reciprocal {meta.reciprocal}"
        )
    return f"{meta.dataset_name}_{DGLKE_MODELS[meta.score_function]}_"


def _blocks(
    checkpoint: Checkpoint, table: str, names: Vocabulary
) -> Iterator[tuple[Sequence[str], np.ndarray]]:
    """Yield (names, rows) in the order of ids; with a progress bar where it takes a while."""
    count = len(checkpoint[table])
    with tqdm(total=count, desc=table, unit="row", disable=count < PROGRESS_FROM_ROWS or None) as bar:
        for start in range(0, count, ROWS_AT_A_TIME):
            ids = torch.arange(start, min(count, start + ROWS_AT_A_TIME))
            yield names.names[start : start + len(ids)], checkpoint.gather(table, ids).numpy()
            bar.update(len(ids))


@contextlib.contextmanager
def _whole_file(target: Path) -> Iterator[BinaryIO]:
    """Open a file that takes its name only when it was written to its end."""
    temporary = target.with_name(target.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_names(names: Vocabulary, target: Path) -> Path:
    with _whole_file(target) as file:
        file.writelines(f"{name}\n".encode() for name in names.names)
    return target


def _write_npy(file: BinaryIO, shape: Shape, blocks: Blocks) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    _write_raw(file, blocks)


def _write_safetensors(file: BinaryIO, shape: Shape, blocks: Blocks) -> None:
    """Write one tensor; https://huggingface.co/docs/safetensors has the format."""
    tensor = {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 4 * shape[0] * shape[1]]}
    header = json.dumps({SAFETENSORS_NAME: tensor}).encode()
    header += b" " * (-len(header) % 8)
    file.write(struct.pack("<Q", len(header)) + header)
    _write_raw(file, blocks)


def _write_raw(file: BinaryIO, blocks: Blocks) -> None:
    for _, rows in blocks:
        file.write(np.ascontiguousarray(rows, dtype="<f4").tobytes())


def _write_parquet(file: BinaryIO, shape: Shape, blocks: Blocks) -> None:
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


def word2vec_name(name: str) -> str:
    """Return a name as word2vec's text format can have it: without white space."""
    return "_".join(name.split())


def _write_lines(file: BinaryIO, rows: np.ndarray, names: Sequence[str], separator: str) -> None:
    """Write a name and its numbers on each line."""
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
"""Format to suffix of its files and what writes one."""

WITHOUT_NAMES = ("npy", "safetensors", "dglke")
"""Formats that have the names in a file beside the rows."""
