"""Writes the rows of a machine: one HDF5 file for each part of an entity type, one for the relations."""

from __future__ import annotations

import contextlib
import io
import json
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from dglkge.checkpoint import hdf5_format, layout
from dglkge.checkpoint.bigraph import learning_rate
from dglkge.checkpoint.durable import LeasedFolder
from dglkge.checkpoint.hdf5_format import file_dtype, take_rows
from dglkge.checkpoint.manifest import CheckpointMeta, FileEntry, TextEntry
from dglkge.checkpoint.relation_layout import (
    MODEL_GROUP,
    global_sums_path,
    global_vector_key,
    global_vector_path,
    to_bigraph_sums,
    to_parameters,
)
from dglkge.checkpoint.storage import describe_text
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import CheckpointError
from dglkge.model.choices import OPTIMIZERS
from dglkge.typing import RELATION, TablePart

NUM_BLOCKS_IN_MEMORY = 4
"""Blocks of rows that are being reordered or wait to be written: back-pressure on the reordering."""

NUM_BLOCKS_BETWEEN_ADVICE = 8
"""Blocks between two calls of posix_fadvise, each of which makes the kernel wait for all cores briefly."""


def fill_rows(path: Path, tables: Mapping[str, torch.Tensor], order: torch.Tensor) -> int:
    """Write rows in a given order to their places in a closed file.

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

    Returns
    -------
    int
        CRC-32 of the whole file.

    Raises
    ------
    OSError
        If there is no room on the disk.
    """
    # Offsets are read from the closed file: HDF5 must not write to it any more while the rows are written.
    with hdf5_format.open_file(path) as file:
        places = {name: file[name].id.get_offset() for name in tables}
    # An empty dataset has no place, and no blocks either.
    in_file_order = sorted((place, name) for name, place in places.items() if place is not None)
    checksum = 0
    with open(path, "r+b", buffering=0) as raw, _BlockWriter(raw) as writer:
        # In the order of the file, so that the CRC-32 is computed in the same pass as the rows are written.
        for place, name in in_file_order:
            checksum = _pass_over(raw, writer.position, place, checksum)
            writer.position = place
            for block in _ordered_blocks(tables[name], order.numpy(), writer):
                checksum = zlib.crc32(block, checksum)
                writer.write(block)
        return _pass_over(raw, writer.position, os.fstat(raw.fileno()).st_size, checksum)


class _BlockWriter:
    """Writes blocks one after the other in a thread, from memory that is reused.

    Parameters
    ----------
    raw : io.FileIO
    """

    def __init__(self, raw: io.FileIO) -> None:
        self.position = 0
        self._num_written = 0
        self._raw = raw
        # One thread: CRC-32 and reordering of the next block overlap with the write of this one, and blocks
        # stay in order.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dglkge-checkpoint-blocks")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> _BlockWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for all blocks."""
        self._thread.shutdown()
        while self._waiting:
            self._waiting.popleft().result()

    def wait_for_memory(self) -> None:
        """Return when the memory of all but the last blocks may be used again."""
        while len(self._waiting) >= NUM_BLOCKS_IN_MEMORY:
            self._waiting.popleft().result()

    def write(self, block: memoryview) -> None:
        """Write a block behind the one before; see :meth:`wait_for_memory` for when its memory is free."""
        try:
            self._waiting.append(self._thread.submit(self._write, block, self.position))
        except RuntimeError:
            # The interpreter is shutting down and starts no thread, but waits for this one, which now writes.
            self._write(block, self.position)
        self.position += block.nbytes

    def _write(self, block: memoryview, place: int) -> None:
        descriptor, written = self._raw.fileno(), 0
        # POSIX permits pwrite to write fewer bytes than given.
        while written < block.nbytes:
            written += os.pwrite(descriptor, block[written:], place + written)
        self._num_written += 1
        if self._num_written % NUM_BLOCKS_BETWEEN_ADVICE == 0:
            with contextlib.suppress(OSError):  # advice only; some disks take none
                # What is not on the disk yet begins to be written; what is leaves the cache.
                os.posix_fadvise(descriptor, 0, place + written, os.POSIX_FADV_DONTNEED)


def _ordered_blocks(values: torch.Tensor, order: np.ndarray, writer: _BlockWriter) -> Iterator[memoryview]:
    """Yield the bytes of rows in a given order, in blocks of memory that the writer has released.

    By numpy and not by torch: torch's threads would wait for cores that training uses.
    """
    memories: list[np.ndarray] = []
    dtype = file_dtype(values)
    for start, stop in hdf5_format.row_blocks(tuple(values.shape), dtype.itemsize):
        writer.wait_for_memory()
        if len(memories) < NUM_BLOCKS_IN_MEMORY:
            memories.append(np.empty((stop - start, *values.shape[1:]), dtype=dtype))
        else:
            memories.append(memories.pop(0))
        block = memories[-1][: stop - start]
        take_rows(values, order[start:stop], block)
        yield block.reshape(-1).view(np.uint8).data


def _pass_over(raw: io.FileIO, start: int, stop: int, checksum: int) -> int:
    """Add the bytes that HDF5 wrote between two datasets to a checksum."""
    while start < stop:
        piece = os.pread(raw.fileno(), min(stop - start, hdf5_format.BLOCK_BYTES), start)
        if not piece:
            raise OSError(f"{raw.name} ends at {start}, expected {stop} bytes")
        checksum = zlib.crc32(piece, checksum)
        start += len(piece)
    return checksum


def write_part(
    folder: LeasedFolder,
    version: int,
    part: TablePart,
    meta: CheckpointMeta,
    attributes: Mapping[str, Any],
) -> FileEntry:
    """Write the rows and the state of one part of an entity type.

    Parameters
    ----------
    folder : LeasedFolder
        Of the version, or the outbox of a machine.
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
    expected = (len(ids), meta.dims.get(part.table, meta.dim))
    if part.rows.shape != expected:
        raise CheckpointError(
            f"table {part.table!r}: rows have shape {tuple(part.rows.shape)}, expected {expected}"
        )
    name = layout.embeddings_file(part.table, part.part, version)
    tables = {
        hdf5_format.EMBEDDINGS: part.rows,
        hdf5_format.ORIGINAL_IDS: part.original_ids,
        **_state_datasets(part),
    }
    with folder.new_file(name) as path:
        with hdf5_format.create(path, attributes) as file:
            for dataset, values in tables.items():
                hdf5_format.allocate_rows(file, dataset, values)
            # PyTorch-BigGraph's blob is small compared with the rows, so HDF5 writes it itself.
            sums = _bigraph_sums(part, meta)
            # PyTorch-BigGraph keeps one sum for each entity row: the mean over the row is what row-wise
            # Adagrad would have.
            of_rows = sums if sums.ndim == 1 else sums.mean(dim=1)
            state = _bigraph_state([of_rows[order].cpu()], learning_rate(meta))
            hdf5_format.write_blob(file.require_group(hdf5_format.OPTIMIZER_GROUP), state)
        return _entry(path, name, part, ids, fill_rows(path, tables, order))


def write_relations(
    folder: LeasedFolder,
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
    with folder.new_file(name) as path:
        with hdf5_format.create(path, attributes) as file:
            # As in PyTorch-BigGraph's files: members keep the order of creation. HDF5's default order is by
            # name.
            file.create_group(MODEL_GROUP, track_order=True)
            # Relations are few: they are reordered in memory and written by HDF5 itself.
            rows = part.rows.detach()[order].cpu().float().numpy()
            for dataset, key, values in to_parameters(rows, meta):
                written = file.create_dataset(dataset, data=values)
                if key is not None:
                    written.attrs[hdf5_format.STATE_DICT_KEY_ATTRIBUTE] = key
            of_types = _write_shared(file, part, meta)
            for dataset, state in _state_datasets(part).items():
                hdf5_format.allocate_rows(file, dataset, state)
            sums = _bigraph_sums(part, meta)[order].cpu().numpy()
            relation_lr = float(meta.optimizer.get("relation_lr", learning_rate(meta)))
            of_operators = [torch.from_numpy(each) for each in to_bigraph_sums(sums, rows.shape[1], meta)]
            hdf5_format.write_blob(
                file.require_group(hdf5_format.OPTIMIZER_GROUP),
                _bigraph_state([*of_operators, *of_types], relation_lr),
            )
        crc32 = fill_rows(path, _state_datasets(part), order)
        return _entry(path, name, part, ids, crc32)


def _write_shared(file: h5py.File, part: TablePart, meta: CheckpointMeta) -> list[torch.Tensor]:
    """Write the tensors of the whole model; returns Adagrad's sums of the global vectors, if there are any.

    PyTorch-BigGraph has the vectors behind all operators among its parameters, in the order of entity types.
    """
    for path, values in part.shared.items():
        file.create_dataset(path, data=values.numpy())
    types = [name for name in meta.entity_types if global_vector_path(name) in part.shared]
    for name in types:
        written = file[global_vector_path(name)]
        written.attrs[hdf5_format.STATE_DICT_KEY_ATTRIBUTE] = global_vector_key(name)
    return [part.shared[global_sums_path(name)] for name in types]


def write_names(
    folder: LeasedFolder, table: str, part: int, ids: Sequence[int], names: Vocabulary | None
) -> tuple[TextEntry, TextEntry]:
    """Write PyTorch-BigGraph's list of a part's names and its count.

    Parameters
    ----------
    folder : LeasedFolder
    table : str
    part : int
    ids : sequence of int
        The part's original ids, ascending.
    names : Vocabulary or None
        Without names the ids stand in.
    """
    list_file, count_file = layout.entity_names_file(table, part), layout.entity_count_file(table, part)
    with folder.new_file(list_file) as path:
        # Streamed by hand: json.dumps of a list would build the whole text of millions of names in memory.
        with open(path, "w", encoding="utf-8") as file:
            file.write("[")
            for index, id_ in enumerate(ids):
                name = str(id_) if names is None else names[id_]
                file.write(("," if index else "") + "\n    " + json.dumps(name))
            file.write("\n]" if ids else "]")
    folder.write_text(count_file, f"{len(ids)}\n")
    described = [describe_text(folder.path / name, name) for name in (list_file, count_file)]
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
    numbers = list(range(len(sums)))
    group = {"lr": lr, "lr_decay": 0, "weight_decay": 0, "params": numbers}
    group |= {"eps": 1e-10, "initial_accumulator_value": 0}
    # Copies: torch.save writes the whole storage of a view.
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
