"""Rows from other programs' files as a checkpoint of a run on a dataset, matched by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch

from dglkge.checkpoint.conversion import save_converted
from dglkge.checkpoint.dataset_fields import dataset_fields
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.data.dataset import Dataset
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError, unknown_name
from dglkge.inference.export import SAFETENSORS_NAME, word2vec_name
from dglkge.typing import RELATION, TablePart

Named = tuple[Sequence[str], np.ndarray]


def import_tables(
    folder: Path, file_format: str, dataset: Dataset, score_function: str, reciprocal: bool, output: Path
) -> int:
    """Write the tables in a folder of files as the first version of a run.

    Parameters
    ----------
    folder : Path
        Holds the files that :func:`dglkge.inference.export.export_tables` writes; for DGL-KE ``*_entity.npy``
        and ``*_relation.npy``. Where there is no ``{table}.names.txt``, rows are in the order of the dataset.
    file_format : str
        One of ``READERS``.
    dataset : Dataset
    score_function : str
        Of the model that the rows belong to.
    reciprocal : bool
        Whether a relation's row has a half for each side.
    output : Path
        The run's folder.

    Returns
    -------
    int
        The version, 1.

    Raises
    ------
    InputError
        If a file is missing or damaged, a name of the dataset has no row, or widths do not fit.
    """
    if file_format not in READERS:
        raise unknown_name("format", file_format, READERS)
    names = {name: dataset.vocabulary(name) for name in dataset.entity_types}
    parts = {}
    for table in [*dataset.entity_types, RELATION]:
        wanted = dataset.relations.labels if table == RELATION else names[table]
        rows = _in_order(READERS[file_format](folder, table), wanted, table, file_format)
        parts[table] = TablePart(table, 0, torch.arange(len(rows)), torch.from_numpy(rows))
    widths = {name: parts[name].rows.shape[1] for name in dataset.entity_types}
    if len(set(widths.values())) != 1:
        raise InputError(f"{folder}: the entity tables must be equally wide, got {widths}")
    meta = CheckpointMeta(
        config={},
        **dataset_fields(dataset),
        progress={"finished_epochs": 0, "batches_done": 0, "global_batch_size": 1},
        seed=0,
        score_function=score_function,
        dim=next(iter(widths.values())),
        reciprocal=reciprocal,
    )
    return save_converted(output, meta, parts, names)


def _in_order(found: Named, wanted: Vocabulary, table: str, file_format: str) -> np.ndarray:
    """Return the rows (n, D) float32 in the order of a vocabulary."""
    names, rows = found
    if rows.ndim != 2 or (len(names) and len(names) != len(rows)):
        raise InputError(f"table {table!r}: got rows of shape {rows.shape} and {len(names)} names")
    if len(names):
        keys = [word2vec_name(name) if file_format == "word2vec" else name for name in wanted.names]
        index = pd.Index(list(names), dtype=object)
        if not index.is_unique:
            raise InputError(f"table {table!r}: name {index[index.duplicated()][0]!r} stands there twice")
        places = index.get_indexer(pd.Index(keys, dtype=object))
        if (places < 0).any():
            raise InputError(f"table {table!r}: no row for {keys[int(np.argmin(places))]!r}")
        rows = rows[places]
    elif len(rows) != len(wanted):
        raise InputError(f"table {table!r}: got {len(rows)} rows, expected {len(wanted)}")
    return np.ascontiguousarray(rows, dtype=np.float32)


def _file(folder: Path, pattern: str) -> Path:
    """Return the one file of a folder that fits a pattern."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise InputError(f"expected one file {folder / pattern}, found {len(found)}")
    return found[0]


def _names(folder: Path, table: str) -> list[str]:
    path = folder / f"{table}.names.txt"
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _load_npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged or not an npy file of numbers: {error}") from None


def _read_npy(folder: Path, table: str) -> Named:
    return _names(folder, table), _load_npy(_file(folder, f"{table}.npy"))


def _read_dglke(folder: Path, table: str) -> Named:
    return _names(folder, table), _load_npy(_file(folder, f"*_{table}.npy"))


def _read_safetensors(folder: Path, table: str) -> Named:
    path = _file(folder, f"{table}.safetensors")
    try:
        with open(path, "rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            tensor = json.loads(file.read(header_bytes))[SAFETENSORS_NAME]
        if tensor["dtype"] != "F32":
            raise ValueError(f"dtype is {tensor['dtype']}, expected F32")
        offset = 8 + header_bytes + tensor["data_offsets"][0]
        rows = np.memmap(path, dtype="<f4", mode="c", offset=offset, shape=tuple(tensor["shape"]))
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise InputError(f"{path} is damaged or has no tensor {SAFETENSORS_NAME!r}: {error}") from None
    return _names(folder, table), rows


def _read_parquet(folder: Path, table: str) -> Named:
    path = _file(folder, f"{table}.parquet")
    try:
        content = pq.read_table(path, columns=["name", "embedding"])
        flat = content.column("embedding").combine_chunks()
        rows = flat.flatten().to_numpy().reshape(len(content), -1)
        return content.column("name").to_pylist(), rows
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors are among them
        raise InputError(f"{path} is damaged or lacks name and embedding: {error}") from None


def _read_word2vec(folder: Path, table: str) -> Named:
    path = _file(folder, f"{table}.vec")
    try:
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        num_rows, width = map(int, head.split())
        fields = [line.rsplit(" ", width) for line in lines]
        rows = np.array([row[1:] for row in fields], dtype=np.float32)
        if rows.shape != (num_rows, width):
            raise ValueError(f"got rows of shape {rows.shape}, its head says {(num_rows, width)}")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged or not word2vec text: {error}") from None
    return [row[0] for row in fields], rows


READERS: dict[str, Callable[[Path, str], Named]] = {
    "dglke": _read_dglke,
    "npy": _read_npy,
    "parquet": _read_parquet,
    "safetensors": _read_safetensors,
    "word2vec": _read_word2vec,
}
"""Format to what reads one table of it."""
