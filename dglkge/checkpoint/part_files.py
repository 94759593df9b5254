"""Files of rows: one HDF5 file for each part of an entity type, one for all relations.

A machine writes its parts, and fills live tables from the files of a version, however that was partitioned.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import numpy as np
import torch

from dglkge.checkpoint import hdf5_format, layout
from dglkge.checkpoint.hdf5_format import file_dtype, put_rows, take_rows
from dglkge.checkpoint.manifest import CheckpointMeta, FileEntry, Manifest
from dglkge.checkpoint.storage import check_crc32, check_files, file_crc32
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.errors import CheckpointError
from dglkge.formats import relation_parameters
from dglkge.formats.bigraph_files import learning_rate
from dglkge.model.choices import OPTIMIZERS
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import RELATION, TRAINED_ROWS, TablePart

logger = logging.getLogger(__name__)

Rows: TypeAlias = h5py.Dataset | np.ndarray

ADVICE_BYTES = 16 << 20
"""Distance of two calls of posix_fadvise, each of which makes the kernel wait for all cores briefly."""


def fill_rows(path: Path, tables: Mapping[str, torch.Tensor], order: torch.Tensor) -> int:
    """Write rows in a given order to their places in a closed file; return the CRC-32 of the whole file.

    Write-back starts at once and not when the file is synced, and written pages leave the page cache: a
    version must not evict the files that training has mapped.

    Parameters
    ----------
    path : Path
        A file in which :func:`dglkge.checkpoint.hdf5_format.allocate_rows` has made place.
    tables : mapping of str to (n, ...) tensor
        Rows by dataset.
    order : (n,) int64 tensor
        Row i of the file is ``values[order[i]]``.
    """
    # Offsets are read from the closed file: HDF5 must not write to it any more while the rows are written.
    with hdf5_format.open_file(path) as file:
        places = {file[name].id.get_offset(): name for name in tables}
    places.pop(None, None)  # an empty dataset has no place, and no blocks either
    checksum = position = 0
    write: Future[None] = Future()
    write.set_result(None)
    with (
        open(path, "r+b", buffering=0) as raw,
        # One thread: CRC-32 and reordering of the next block overlap with the write of this one, and blocks
        # stay in order.
        ThreadPoolExecutor(max_workers=1, thread_name_prefix="dglkge-checkpoint-blocks") as thread,
    ):
        # In the order of the file, so that the CRC-32 is computed in the same pass as the rows are written.
        for place in sorted(places):
            # Between two datasets is what HDF5 wrote.
            checksum = file_crc32(raw, position, place, checksum)
            position = place
            for block in _ordered_blocks(tables[places[place]], order.numpy()):
                checksum = zlib.crc32(block, checksum)
                # The block before last is written by now, so that its memory may be filled again.
                write.result()
                try:
                    write = thread.submit(_write_block, raw, block, position)
                except RuntimeError:
                    # The interpreter is shutting down and starts no thread, but waits for this one.
                    _write_block(raw, block, position)
                position += block.nbytes
        write.result()
        return file_crc32(raw, position, checksum=checksum)


def _write_block(raw: io.FileIO, block: memoryview, place: int) -> None:
    """Write a block, and advise the kernel from time to time."""
    descriptor, written = raw.fileno(), 0
    # POSIX permits pwrite to write fewer bytes than given.
    while written < block.nbytes:
        written += os.pwrite(descriptor, block[written:], place + written)
    end = place + written
    if end // ADVICE_BYTES > place // ADVICE_BYTES:
        with contextlib.suppress(OSError):  # advice only; some disks take none
            # What is not on the disk yet begins to be written; what is leaves the cache.
            os.posix_fadvise(descriptor, 0, end, os.POSIX_FADV_DONTNEED)


def _ordered_blocks(values: torch.Tensor, order: np.ndarray) -> Iterator[memoryview]:
    """Yield the bytes of rows in a given order, in two blocks of memory by turns.

    By numpy and not by torch: torch's threads would wait for cores that training uses.
    """
    dtype, memories = file_dtype(values), []
    for number, (start, stop) in enumerate(hdf5_format.row_blocks(tuple(values.shape), dtype.itemsize)):
        if number < 2:
            memories.append(np.empty((stop - start, *values.shape[1:]), dtype=dtype))
        block = memories[number % 2][: stop - start]
        take_rows(values, order[start:stop], block)
        yield block.reshape(-1).view(np.uint8).data


def write_table(
    folder: LeasedFolder, version: int, part: TablePart, meta: CheckpointMeta, attributes: Mapping[str, Any]
) -> FileEntry:
    """Write the rows and the state of one part of an entity type, by ascending id, or of all relations.

    CheckpointError if the part does not fit the run: wrong width, ids twice or out of range.
    """
    (order, ids), sums, lr = _ascending(part, meta), _bigraph_sums(part, meta), learning_rate(meta)
    name, tables = layout.model_file(version), _state_datasets(part)
    if part.table != RELATION:
        name = layout.embeddings_file(part.table, part.part, version)
        tables = {hdf5_format.EMBEDDINGS: part.rows, hdf5_format.ORIGINAL_IDS: part.original_ids, **tables}
    with folder.new_file(name) as path:
        with hdf5_format.create(path, attributes) as file:
            if part.table == RELATION:
                states = _write_model(file, part, meta, order, sums[order].cpu().numpy())
                lr = float(meta.optimizer.get("relation_lr", lr))
            else:
                # PyTorch-BigGraph keeps one sum for each entity row: the mean over the row is what row-wise
                # Adagrad would have.
                states = [(sums if sums.ndim == 1 else sums.mean(dim=1))[order].cpu()]
            for dataset, values in tables.items():
                hdf5_format.allocate_rows(file, dataset, values)
            # PyTorch-BigGraph's blob is small compared with the rows, so HDF5 writes it itself.
            group = file.require_group(hdf5_format.OPTIMIZER_GROUP)
            hdf5_format.write_blob(group, _bigraph_state(states, lr))
        crc32 = fill_rows(path, tables, order)
        with hdf5_format.open_file(path) as file:
            shapes = hdf5_format.shapes(file)
        ids_crc32, size = zlib.crc32(ids.tobytes()), path.stat().st_size
    return FileEntry(name, part.table, part.part, len(ids), size, crc32, ids_crc32, shapes)


def _write_model(
    file: h5py.File, part: TablePart, meta: CheckpointMeta, order: torch.Tensor, sums: np.ndarray
) -> list[torch.Tensor]:
    """Write relations as PyTorch-BigGraph's operators, and the tensors of the whole model.

    Returns Adagrad's sums of its parameters: the operators', then those of global vectors, by entity type.
    """
    # As in PyTorch-BigGraph's files: members keep the order of creation. HDF5's default order is by name.
    file.create_group(relation_parameters.MODEL_GROUP, track_order=True)
    # Relations are few: they are reordered in memory and written by HDF5 itself.
    rows = part.rows.detach()[order].cpu().float().numpy()
    for dataset, key, array in relation_parameters.to_parameters(rows, meta):
        written = file.create_dataset(dataset, data=array)
        if key is not None:
            written.attrs[hdf5_format.STATE_DICT_KEY_ATTRIBUTE] = key
    for path, values in part.shared.items():
        file.create_dataset(path, data=values.numpy())
    states = list(map(torch.from_numpy, relation_parameters.to_bigraph_sums(sums, rows.shape[1], meta)))
    for name in meta.entity_types:
        if (path := relation_parameters.global_vector_path(name)) in part.shared:
            key = relation_parameters.global_vector_key(name)
            file[path].attrs[hdf5_format.STATE_DICT_KEY_ATTRIBUTE] = key
            states.append(part.shared[hdf5_format.global_sums_path(name)])
    return states


def _ascending(part: TablePart, meta: CheckpointMeta) -> tuple[torch.Tensor, np.ndarray]:
    """Return the order of the rows by original id, and the ids in that order."""
    counts = {**meta.entity_types, RELATION: len(meta.relations)}
    if part.table not in counts:
        raise CheckpointError(f"table {part.table!r} is none of the run's: {', '.join(map(repr, counts))}")
    sorted_ids, order = torch.sort(part.original_ids)
    ids = sorted_ids.cpu().numpy()
    if part.table == RELATION and len(ids) != len(meta.relations):
        raise CheckpointError(f"{len(ids)} relations were handed in, expected {len(meta.relations)}")
    shape, expected = tuple(part.rows.shape), (len(ids), meta.entity_dim(part.table))
    if part.table != RELATION and shape != expected:
        raise CheckpointError(f"table {part.table!r}: rows have shape {shape}, expected {expected}")
    # The sorted ids make both checks cheap: first and last give the range, equal neighbours are duplicates.
    if len(ids) and (ids[0] < 0 or ids[-1] >= counts[part.table] or (np.diff(ids) == 0).any()):
        raise CheckpointError(
            f"table {part.table!r}, part {part.part}: original ids must be distinct "
            f"and in 0..{counts[part.table] - 1}; got {ids[0]}..{ids[-1]}"
        )
    return order, ids


def _state_datasets(part: TablePart) -> dict[str, torch.Tensor]:
    """Return each tensor of the optimizer's state by the dataset that it goes to."""
    # A state named like PyTorch-BigGraph's blob would overwrite it, and a "/" would create a group.
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
    name = meta.optimizer.get("name")
    if part.table == RELATION:
        name = meta.optimizer.get("relation_name", name)
    if kept and name in OPTIMIZERS and list(OPTIMIZERS.get(str(name))().state_shapes(1)) == ["sum"]:
        sums = kept[0].detach()
        return sums.reshape(-1) if sums.numel() == len(sums) else sums
    return torch.zeros(len(part.original_ids))


def _bigraph_state(sums: Sequence[torch.Tensor], lr: float) -> dict[str, Any]:
    """Return Adagrad's state of some parameters as PyTorch-BigGraph's optimizers name it.

    They need a number of steps beside the sums, which matters only to a decaying learning rate.
    """
    group = {"lr": lr, "lr_decay": 0, "weight_decay": 0, "params": list(range(len(sums)))}
    group |= {"eps": 1e-10, "initial_accumulator_value": 0}
    # Copies: torch.save writes the whole storage of a view.
    state = {number: {"step": torch.tensor(0.0), "sum": values.clone()} for number, values in enumerate(sums)}
    return {"state": state, "param_groups": [group]}


def fill_part(
    folder: Path, manifest: Manifest, part: TablePart, saved_ids: torch.Tensor | None = None
) -> None:
    """Write the rows and state of a version's folder over those of a live part, checking the files.

    Of a file that has none of the part's rows only the ids are read: where the parts are those of the
    checkpoint, each machine reads its own files. Every row belongs to some machine, so every file that has
    rows is read, and its checksum checked, by one of them.

    Parameters
    ----------
    saved_ids : (n,) int64 tensor, optional
        Original id that each row has in the checkpoint, -1 for a row that stays as it is; without them the
        part's own ids. Several rows may have one.

    Raises
    ------
    CheckpointError
        If a file is damaged, or the checkpoint lacks one of the rows or has them in another width; the live
        rows are then of no use.
    """
    saved_ids = part.original_ids if saved_ids is None else saved_ids
    present = (saved_ids >= 0).nonzero().squeeze(1)
    # Both lists of ids are sorted, so rows are matched by merging: no index of all ids is built.
    sorted_ids, order = torch.sort(saved_ids[present])
    live = (sorted_ids.cpu().numpy(), present[order].numpy())
    num_found, files = 0, manifest.table_files(part.table)
    for entry in files:
        check_files(folder, [entry], checksums=False)
        try:
            num_found += _fill_from(folder, manifest, entry, part, live)
        except Exception:
            # A damaged file is reported as such, not by the error that its content caused.
            check_files(folder, [entry])
            raise
    if num_found != len(present):
        check_files(folder, files)  # the ids of one may be damaged
        raise CheckpointError(
            f"{folder} has {num_found} of the {len(present)} rows of table {part.table!r}, part {part.part}"
        )


def _fill_from(
    folder: Path, manifest: Manifest, entry: FileEntry, part: TablePart, live: tuple[np.ndarray, np.ndarray]
) -> int:
    """Fill a live part from one file, comparing its checksum; return the number of rows.

    It is not read if it has rows and none is the part's. `live` has ascending ids in the checkpoint, which
    may repeat, and where their rows are.
    """
    path, meta = folder / entry.name, manifest.meta
    live_ids, live_rows = live
    rows: Rows
    with hdf5_format.open_file(path) as file:
        if part.table == RELATION:
            rows = read_relations(path, file, meta)
            ids = np.arange(len(rows))
        else:
            rows = file[hdf5_format.EMBEDDINGS]
            ids = hdf5_format.original_ids(path, file, manifest.first_id(entry))
        width, live_width = rows.shape[1], part.rows.shape[1]
        if width != live_width:
            widths = f"are {width} wide, this run's are {live_width}"
            raise CheckpointError(f"{path}: rows of table {part.table!r} {widths}")
        places = np.searchsorted(ids, live_ids).clip(max=len(ids) - 1)
        is_here = ids[places] == live_ids if len(ids) else np.zeros(len(live_ids), dtype=bool)
        here, target_rows = places[is_here], live_rows[is_here]
        # A file without rows is no machine's, so every machine reads it for its checksum.
        if len(ids) and not len(here):
            return 0
        state = read_state(path, file, part.table, meta)
        for name in sorted(set(state) - set(part.state)):
            logger.warning("%s: optimizer state %r is not used by this run's optimizer", path, name)
        # Rows without averages are those that train.
        state = {TRAINED_ROWS: rows, **state}
        fitting = [name for name, values in part.state.items() if _state_fits(name, values, state, path)]
        pairs = [(rows, part.rows), *((state[name], part.state[name]) for name in fitting)]
        # The checksum is computed in a thread, while rows are copied: both go through the file in its order.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="dglkge-checkpoint-reader") as thread:
            checksum = thread.submit(file_crc32, path)
            for source, values in pairs:
                for start, stop in hdf5_format.row_blocks(source.shape, source.dtype.itemsize):
                    # Both lists are ascending, so a block's matches are one range of them.
                    first, last = np.searchsorted(here, (start, stop))
                    block, matches = source[start:stop], here[first:last] - start
                    if not np.array_equal(matches, np.arange(len(block))):
                        # By numpy: torch would start threads that compete for cores with the one that reads.
                        block = block[matches]
                    put_rows(values, target_rows[first:last], block)
            check_crc32(path, entry.crc32, checksum.result())
        return len(here)


def read_state(
    path: Path, file: h5py.File, table: str, meta: CheckpointMeta
) -> Mapping[str, h5py.Dataset | np.ndarray]:
    """Return the optimizer state of a file's rows by name: plain datasets, else PyTorch-BigGraph's blob."""
    group = file.get(hdf5_format.OPTIMIZER_GROUP, {})
    plain = {name: dataset for name, dataset in group.items() if name != hdf5_format.STATE_BLOB}
    if plain or hdf5_format.STATE_BLOB not in group:
        return plain
    blob = hdf5_format.read_blob(group[hdf5_format.STATE_BLOB])
    state = blob.get("state", {}) if isinstance(blob, dict) else None
    if not isinstance(state, dict):
        where = f"{path}:{group.name}/{hdf5_format.STATE_BLOB}"
        raise CheckpointError(f"{where}: not the state of an optimizer")
    if table != RELATION:
        # A file of rows has one parameter, number 0.
        values = state[0] if set(state) == {0} else {}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        return {name: value.numpy() for name, value in tensors.items() if value.ndim}
    try:
        return {"sum": relation_parameters.bigraph_row_sums(state, meta, relation_width(file, meta))}
    except (KeyError, ValueError, TypeError) as error:
        # State is optional: it starts anew, while a missing row is an error.
        logger.warning("%s: the optimizer's state is not that of the operators (%r)", path, error)
        return {}


def read_relations(path: Path, file: h5py.File, meta: CheckpointMeta) -> np.ndarray:
    """Return all relation rows of a model file, (R, W) float32."""
    width = relation_width(file, meta)
    try:
        return relation_parameters.from_parameters(file, meta, width)
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the relations' operators are not those of the run ({error})"
        ) from None


def relation_width(file: h5py.File, meta: CheckpointMeta) -> int:
    """Return the width of a relation's row: the sizes of the operator's parameters for relation 0, summed."""
    if meta.operators or (meta.dims and meta.score_function):
        return int(SCORE_FUNCTIONS.get(meta.score_function)().relation_dim(meta.dim)) * (1 + meta.reciprocal)
    shapes = hdf5_format.shapes(file)
    groups = ("model/relations/0/operator/", "reciprocal/relations/0/operator/")
    stacked = max(1, len(meta.relations)) if relation_parameters.is_dynamic(meta) else 1
    width = sum(math.prod(shape) // stacked for path, shape in shapes.items() if path.startswith(groups))
    # The operator "none" has no parameters, and one unused number in each of our rows.
    return width or (2 if meta.reciprocal else 1)


def _state_fits(name: str, live: torch.Tensor, state: Mapping[str, Rows], path: Path) -> bool:
    """Return whether stored state fits live state; logs a warning if not."""
    if name not in state:
        logger.warning("%s: has no optimizer state %r; it starts anew", path, name)
        return False
    stored = state[name]
    expected = file_dtype(live)
    if tuple(stored.shape[1:]) != tuple(live.shape[1:]) or stored.dtype != expected:
        logger.warning(
            "%s: optimizer state %r is %s of row shape %s, this run's is %s of %s; it starts anew",
            path, name, stored.dtype, tuple(stored.shape[1:]), expected, tuple(live.shape[1:]),
        )  # fmt: skip
        return False
    return True
