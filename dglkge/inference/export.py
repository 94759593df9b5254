"""A checkpoint's rows in formats that other programs read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Callable

import numpy as np
import torch
from tqdm import tqdm

from dglkge.checkpoint.reader import Checkpoint
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError, unknown_name
from dglkge.typing import RELATION

ROWS_AT_A_TIME = 8192
PROGRESS_FROM_ROWS = 200_000

Writer = Callable[[BinaryIO, np.ndarray, Sequence[str]], None]


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
        If the format or a table is unknown, a file exists, or the folder cannot be written to.
    """
    if file_format not in FORMATS:
        raise unknown_name("format", file_format, FORMATS)
    suffix, write_head, write_rows = FORMATS[file_format]
    targets = {table: folder / f"{table}{suffix}" for table in tables}
    existing = [target for target in targets.values() if target.exists()]
    if existing and not overwrite:
        raise InputError(f"{existing[0]} exists; allow it to be replaced, or take another folder")
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for table, target in targets.items():
            names = checkpoint.relations.labels if table == RELATION else checkpoint.vocabulary(table)
            with _whole_file(target) as file:
                write_head(file, checkpoint[table].shape)
                for start, rows in _blocks(checkpoint, table):
                    write_rows(file, rows, names.names[start : start + len(rows)])
            written.append(target)
            if file_format == "npy":
                written.append(_write_names(names, folder / f"{table}.names.txt"))
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from error
    return written


def _blocks(checkpoint: Checkpoint, table: str) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first id, rows) in the order of ids; with a progress bar where it takes a while."""
    count = len(checkpoint[table])
    with tqdm(total=count, desc=table, unit="row", disable=count < PROGRESS_FROM_ROWS or None) as bar:
        for start in range(0, count, ROWS_AT_A_TIME):
            ids = torch.arange(start, min(count, start + ROWS_AT_A_TIME))
            yield start, checkpoint.gather(table, ids).numpy()
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


def _npy_head(file: BinaryIO, shape: tuple[int, int]) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _npy_rows(file: BinaryIO, rows: np.ndarray, names: Sequence[str]) -> None:
    file.write(np.ascontiguousarray(rows, dtype="<f4").tobytes())


def _no_head(file: BinaryIO, shape: tuple[int, int]) -> None:
    """Write nothing: a TSV file starts with its first row."""


def _tsv_rows(file: BinaryIO, rows: np.ndarray, names: Sequence[str]) -> None:
    _write_lines(file, rows, names, "\t")


def _word2vec_head(file: BinaryIO, shape: tuple[int, int]) -> None:
    file.write(f"{shape[0]} {shape[1]}\n".encode())


def _word2vec_rows(file: BinaryIO, rows: np.ndarray, names: Sequence[str]) -> None:
    _write_lines(file, rows, ["_".join(name.split()) for name in names], " ")


def _write_lines(file: BinaryIO, rows: np.ndarray, names: Sequence[str], separator: str) -> None:
    """Write a name and its numbers on each line."""
    numbers = separator.join(["%.9g"] * rows.shape[1])
    for name, row in zip(names, rows.tolist()):
        file.write(f"{name}{separator}{numbers % tuple(row)}\n".encode())


FORMATS: dict[str, tuple[str, Callable[[BinaryIO, tuple[int, int]], None], Writer]] = {
    "npy": (".npy", _npy_head, _npy_rows),
    "tsv": (".tsv", _no_head, _tsv_rows),
    "word2vec": (".vec", _word2vec_head, _word2vec_rows),
}
"""Format to suffix of its files, what writes a file's head, and what writes a block of rows."""
