"""Writing what a machine owns: one HDF5 file for a part of an entity type, one for the relations."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dglkge.checkpoint import hdf5_format, layout, row_stream
from dglkge.checkpoint.bigraph_config import learning_rate
from dglkge.checkpoint.file_check import describe_text
from dglkge.checkpoint.manifest import CheckpointMeta, FileEntry, TextEntry
from dglkge.checkpoint.relation_layout import MODEL_GROUP, to_bigraph_sums, to_parameters
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import CheckpointError
from dglkge.typing import RELATION, TablePart


def write_part(
    storage: CheckpointStorage,
    version: int,
    part: TablePart,
    meta: CheckpointMeta,
    attributes: Mapping[str, Any],
) -> FileEntry:
    """Write the rows and the state of one part of an entity type.

    Parameters
    ----------
    storage : CheckpointStorage
    version : int
    part : TablePart
        Its rows in any order; the file has them by ascending original id.
    meta : CheckpointMeta
    attributes : mapping
        Of the file's root.

    Returns
    -------
    FileEntry

    Raises
    ------
    CheckpointError
        If the part does not fit the run: wrong width, ids twice or out of range.
    """
    order, ids = _ascending(part, meta)
    if part.rows.shape != (len(ids), meta.dim):
        raise CheckpointError(
            f"table {part.table!r}: rows have shape {tuple(part.rows.shape)}, expected {(len(ids), meta.dim)}"
        )
    name = layout.embeddings_file(part.table, part.part, version)
    tables = {
        hdf5_format.EMBEDDINGS: part.rows,
        hdf5_format.ORIGINAL_IDS: part.original_ids,
        **_state_datasets(part),
    }
    with storage.new_file(name) as path:
        with hdf5_format.create(path, attributes) as file:
            for dataset, values in tables.items():
                hdf5_format.allocate_rows(file, dataset, values)
            sums = _bigraph_sums(part, meta)
            of_rows = sums if sums.ndim == 1 else sums.mean(dim=1)
            state = _bigraph_state([of_rows[order].cpu()], meta)
            hdf5_format.write_blob(file.require_group(hdf5_format.OPTIMIZER_GROUP), state)
        return _entry(path, name, part, ids, row_stream.fill_rows(path, tables, order))


def write_relations(
    storage: CheckpointStorage,
    version: int,
    part: TablePart,
    meta: CheckpointMeta,
    attributes: Mapping[str, Any],
) -> FileEntry:
    """Write all relations, as PyTorch-BigGraph's operators, and their state.

    Parameters
    ----------
    part : TablePart
        Every relation of the run, in any order.

    Raises
    ------
    CheckpointError
        If a relation is missing, or the part does not fit the run.
    """
    order, ids = _ascending(part, meta)
    if len(ids) != len(meta.relations):
        raise CheckpointError(f"{len(ids)} relations were handed in, expected {len(meta.relations)}")
    name = layout.model_file(version)
    with storage.new_file(name) as path:
        with hdf5_format.create(path, attributes) as file:
            file.create_group(MODEL_GROUP, track_order=True)
            rows = part.rows.detach()[order].cpu().numpy()
            for dataset, key, values in to_parameters(rows, meta):
                written = file.create_dataset(dataset, data=values)
                if key is not None:
                    written.attrs[hdf5_format.STATE_DICT_KEY_ATTRIBUTE] = key
            for dataset, state in _state_datasets(part).items():
                hdf5_format.allocate_rows(file, dataset, state)
            sums = _bigraph_sums(part, meta)[order].cpu().numpy()
            of_operators = [torch.from_numpy(each) for each in to_bigraph_sums(sums, rows.shape[1], meta)]
            hdf5_format.write_blob(
                file.require_group(hdf5_format.OPTIMIZER_GROUP), _bigraph_state(of_operators, meta)
            )
        crc32 = row_stream.fill_rows(path, _state_datasets(part), order)
        return _entry(path, name, part, ids, crc32)


def write_names(
    storage: CheckpointStorage,
    version: int,
    table: str,
    part: int,
    ids: Sequence[int],
    names: Vocabulary | None,
) -> tuple[TextEntry, TextEntry]:
    """Write PyTorch-BigGraph's list of a part's names and its count, staged until the version counts.

    Parameters
    ----------
    storage : CheckpointStorage
    version : int
    table : str
    part : int
    ids : sequence of int
        The part's original ids, ascending.
    names : Vocabulary or None
        Without names the ids stand in.
    """
    files = layout.entity_names_file(table, part), layout.entity_count_file(table, part)
    staged = [layout.staged_file(name, version) for name in files]
    with storage.new_file(staged[0]) as path:
        with open(path, "w", encoding="utf-8") as file:
            file.write("[")
            for index, id_ in enumerate(ids):
                name = str(id_) if names is None else names[id_]
                file.write(("," if index else "") + "\n    " + json.dumps(name))
            file.write("\n]" if ids else "]")
    storage.write_text(staged[1], f"{len(ids)}\n")
    described = [describe_text(storage.path / there, name) for there, name in zip(staged, files)]
    return described[0], described[1]


def ids_crc32(ids: np.ndarray) -> int:
    """Return the CRC-32 of ascending original ids."""
    return zlib.crc32(ids.tobytes())


def _ascending(part: TablePart, meta: CheckpointMeta) -> tuple[torch.Tensor, np.ndarray]:
    """Return the order of the rows by original id, and the ids in that order."""
    counts = {**meta.entity_types, RELATION: len(meta.relations)}
    if part.table not in counts:
        raise CheckpointError(f"table {part.table!r} is none of the run's: {', '.join(map(repr, counts))}")
    sorted_ids, order = torch.sort(part.original_ids)
    ids = sorted_ids.cpu().numpy()
    if len(ids) and (ids[0] < 0 or ids[-1] >= counts[part.table] or (np.diff(ids) == 0).any()):
        raise CheckpointError(
            f"table {part.table!r}, part {part.part}: original ids must be distinct "
            f"and in 0..{counts[part.table] - 1}; got {ids[0]}..{ids[-1]}"
        )
    return order, ids


def _state_datasets(part: TablePart) -> dict[str, torch.Tensor]:
    """Return each tensor of the optimizer's state by the dataset that it goes to."""
    for name, values in part.state.items():
        if values.shape[0] != len(part.original_ids) or name == hdf5_format.STATE_BLOB or "/" in name:
            raise CheckpointError(
                f"optimizer state {name!r} of shape {tuple(values.shape)} "
                f"cannot be stored for {len(part.original_ids)} rows"
            )
    return {f"{hdf5_format.OPTIMIZER_GROUP}/{name}": values for name, values in part.state.items()}


def _bigraph_sums(part: TablePart, meta: CheckpointMeta) -> torch.Tensor:
    """Return Adagrad's sums for PyTorch-BigGraph, which has no other optimizer.

    Row-wise Adagrad's are its own (n,), and so are element-wise Adagrad's (n, W) for relations; for entities,
    for which it keeps one number a row, their mean is written. Adam's moments have no equal there: sums of 0,
    with which Adagrad starts, stand for them.
    """
    kept = list(part.state.values())
    if meta.optimizer.get("name") in ("row_adagrad", "sparse_adagrad") and len(kept) == 1:
        sums = kept[0].detach()
        return sums.reshape(-1) if sums.numel() == len(sums) else sums
    return torch.zeros(len(part.original_ids))


def _bigraph_state(sums: Sequence[torch.Tensor], meta: CheckpointMeta) -> dict[str, Any]:
    """Return Adagrad's state of some parameters as PyTorch-BigGraph's optimizers name it.

    They want a number of steps beside the sums, which matters only to a decaying learning rate.
    """
    numbers = list(range(len(sums)))
    group = {"lr": learning_rate(meta), "lr_decay": 0, "weight_decay": 0, "params": numbers}
    group |= {"eps": 1e-10, "initial_accumulator_value": 0}
    # Copies, since torch.save writes all of the memory that a view looks into.
    state = {number: {"step": torch.tensor(0.0), "sum": sums[number].clone()} for number in numbers}
    return {"state": state, "param_groups": [group]}


def _entry(path: Path, name: str, part: TablePart, ids: np.ndarray, crc32: int) -> FileEntry:
    """Describe a file that was just written."""
    with hdf5_format.open_file(path) as file:
        found = hdf5_format.shapes(file)
    return FileEntry(
        name=name,
        table=part.table,
        part=part.part,
        num_rows=len(ids),
        size_bytes=path.stat().st_size,
        crc32=crc32,
        ids_crc32=ids_crc32(ids),
        shapes=found,
    )
