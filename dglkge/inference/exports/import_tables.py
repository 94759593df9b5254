"""Import of rows from other programs' files, matched by name, as the checkpoint of a run on a data set."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from dglkge.checkpoint.conversion import dataset_fields, save_converted
from dglkge.checkpoint.layout import Progress
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.data.dataset import Dataset
from dglkge.data.vector_files import open_vectors, word2vec_name
from dglkge.data.vocabulary import Vocabulary, read_lines
from dglkge.errors import InputError, require_known
from dglkge.inference.exports.dglke_files import ENTITY, DglkeFolder, load_npy, one_file, require_width
from dglkge.inference.exports.export import SAFETENSORS_NAME
from dglkge.inference.exports.files import names_file
from dglkge.inference.exports.hub import map_tensors
from dglkge.model.kge_model import build_model
from dglkge.typing import RELATION, TablePart

logger = logging.getLogger(__name__)

Named = tuple[Sequence[str], np.ndarray]
Reader = Callable[[Path, str], Named]


def import_tables(
    folder: Path,
    file_format: str,
    dataset: Dataset,
    score_function: str | None,
    reciprocal: bool,
    output: Path,
    score_options: Mapping[str, Any] | None = None,
) -> int:
    """Write the tables in a folder of files as the first version, 1, of a run in another folder.

    Parameters
    ----------
    folder : Path
        The files that :func:`dglkge.inference.exports.export.export_tables` writes. Without
        ``{table}.names.txt`` and DGL-KE's id map, rows are taken in the order of the data set.
    score_function : str or None
        Score function of the model. None for DGL-KE's files, which name it.
    reciprocal : bool
        Whether a relation's row has a half for each side.
    """
    require_known("format", file_format, FORMATS)
    read = READERS.get(file_format)
    if read is None:  # DGL-KE's folder is read as a whole
        if reciprocal:
            raise InputError("DGL-KE has no reciprocal relations; leave --reciprocal out")
        if len(dataset.entity_types) != 1:
            types = ", ".join(dataset.entity_types)
            raise InputError(f"DGL-KE's files have one entity type, the data set has {types}")
        files = DglkeFolder.open(folder, score_function)
        score_function, read = files.score_function, partial(_read_dglke, files)
    if score_function is None:
        raise InputError("--from needs --score-function: files of rows do not say what model they belong to")
    names = {name: dataset.vocabulary(name) for name in dataset.entity_types}
    parts = {}
    # Matched by label, as the export writes them: several relations may share a name.
    for table in [*dataset.entity_types, RELATION]:
        vocabulary = dataset.relations.labels if table == RELATION else names[table]
        rows = _in_order(read(folder, table), vocabulary, table, file_format)
        parts[table] = TablePart(table, 0, torch.arange(len(rows)), torch.from_numpy(rows))
    widths = {name: parts[name].rows.shape[1] for name in names}
    # A score function has one dimension for entities of all types.
    if len(set(widths.values())) != 1:
        raise InputError(f"{folder}: the entity tables must be equally wide, got {widths}")
    model = build_model(score_function, min(widths.values()), reciprocal, score_options)
    require_width(model, score_function, parts[RELATION].rows, folder)
    if model.score_function.has_module or model.score_function.operators:
        raise InputError(
            f"files of rows hold neither dense parameters nor operators of relations, which {score_function} "
            "has; allowed: another score function, or dglkge checkpoint convert of a checkpoint"
        )
    meta = CheckpointMeta(
        **dataset_fields(dataset),
        progress={Progress.FINISHED_EPOCHS: 0, Progress.BATCHES_DONE: 0, Progress.GLOBAL_BATCH_SIZE: 1},
        score_function=score_function,
        dim=model.dim,
        reciprocal=reciprocal,
        score_options=model.score_function.options,
    )
    return save_converted(output, meta, parts, names)


def _in_order(named: Named, vocabulary: Vocabulary, table: str, file_format: str) -> np.ndarray:
    """Return the rows (n, D) float32 in the order of a vocabulary."""
    names, rows = named
    if rows.ndim != 2 or (len(names) and len(names) != len(rows)):
        raise InputError(f"table {table!r}: got rows of shape {rows.shape} and {len(names)} names")
    if len(names):
        # word2vec's text has no white space in names, so the data set's names are changed as at export
        keys = [word2vec_name(name) if file_format == "word2vec" else name for name in vocabulary.names]
        index = pd.Index(list(names), dtype=object)
        if not index.is_unique:
            raise InputError(f"table {table!r}: name {index[index.duplicated()][0]!r} occurs twice")
        # pandas' hash join: a Python dictionary of 10^7 names takes several times the memory.
        places = index.get_indexer(pd.Index(keys, dtype=object))
        if (places < 0).any():
            raise InputError(f"table {table!r}: no row for {keys[int(np.argmin(places))]!r}")
        rows = rows[places]
    elif len(rows) != len(vocabulary):
        raise InputError(f"table {table!r}: got {len(rows)} rows, expected {len(vocabulary)}")
    return np.ascontiguousarray(rows, dtype=np.float32)


def _names(folder: Path, table: str) -> list[str]:
    path = folder / names_file(table)
    return read_lines(path) if path.is_file() else []


def _read_npy(folder: Path, table: str) -> Named:
    return _names(folder, table), load_npy(one_file(folder, f"{table}.npy"))


def _read_vectors(suffix: str, folder: Path, table: str) -> Named:
    """Read a file that holds names and rows."""
    file = open_vectors(one_file(folder, f"{table}{suffix}"))
    names = list(file.names())
    blocks = [rows.astype(np.float32) for _, rows in file.rows(np.arange(len(names)))]
    return names, np.concatenate(blocks)


def _read_dglke(files: DglkeFolder, folder: Path, table: str) -> Named:
    name = RELATION if table == RELATION else ENTITY
    rows = files.rows(name)
    names = files.names(name, len(rows)) or _names(folder, table)
    if not names:
        order = "its rows are taken in the order of the data set"
        logger.warning("no id map of the table %s in %s: %s", name, folder, order)
    return names, rows


def _read_safetensors(folder: Path, table: str) -> Named:
    tensors = map_tensors(one_file(folder, f"{table}.safetensors"), [SAFETENSORS_NAME])
    return _names(folder, table), tensors[SAFETENSORS_NAME]


SUFFIXES = {"parquet": ".parquet", "tsv": ".tsv", "word2vec": ".vec"}
READERS: dict[str, Reader] = {"npy": _read_npy, "safetensors": _read_safetensors}
READERS |= {name: partial(_read_vectors, suffix) for name, suffix in SUFFIXES.items()}
"""Format to the function that reads one table of it."""
FORMATS = ("dglke", *READERS)
"""All formats that can be read. DGL-KE's has no reader of its own here: its folder is read as a whole."""
