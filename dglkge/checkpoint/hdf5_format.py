"""Reads and writes one HDF5 file of a checkpoint. Rows of 16-bit tables are written as float32, exactly."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np
import torch

from dglkge.checkpoint.layout import FORMAT_VERSION
from dglkge.errors import CheckpointError, one_line, os_errors
from dglkge.registry import deferred

row_kernels = deferred("dglkge.kernels.rows")  # numba takes a fifth of a second

FORMAT_VERSION_ATTRIBUTE = "format_version"
STATE_DICT_KEY_ATTRIBUTE = "state_dict_key"
EMBEDDINGS = "embeddings"
ORIGINAL_IDS = "original_ids"
OPTIMIZER_GROUP = "optimizer"
STATE_BLOB = "state_dict"

DENSE_GROUP = "dense"
"""Holds the dense parameters of a score function's module and their optimizer's state; PyTorch-BigGraph does
not look there."""

BLOCK_BYTES = 2 << 20
"""Size of a block of rows that is reordered at a time: it fits into the CPU's cache, and is reused."""


@contextlib.contextmanager
def create(path: Path, attributes: Mapping[str, Any]) -> Iterator[h5py.File]:
    """Open a new file and write the root's attributes; OSError if it cannot be written to its end.

    HDF5 would keep small datasets in its sieve buffer until they are closed. On a full disk that write fails,
    and HDF5 may abort the process afterwards: so the file has no such buffer.
    """
    with _as_os_errors():
        # Created and closed first, because h5f.open with an access property list needs an existing HDF5 file.
        with h5py.File(path, "w") as empty:
            access = empty.id.get_access_plist()
    # h5py has no argument for this property, so the file is opened through the low-level interface.
    access.set_sieve_buf_size(0)
    file = h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDWR, access))
    try:
        file.attrs[FORMAT_VERSION_ATTRIBUTE] = FORMAT_VERSION
        for name, value in attributes.items():
            file.attrs[name] = value
        yield file
    finally:
        with _as_os_errors():
            file.close()


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise a RuntimeError of h5py as OSError: HDF5 may report a full disk only when it closes a file."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(str(error)) from error


@contextlib.contextmanager
def open_file(path: Path, opened: BinaryIO | None = None) -> Iterator[h5py.File]:
    """Open a file for reading, which may be open already and have lost its name since.

    CheckpointError if it is missing, not an HDF5 file, cut off, of another format version or lacks a dataset.
    """
    if opened is None and not path.is_file():
        raise CheckpointError(f"{path} is missing")
    with os_errors(CheckpointError, f"{path} is damaged or not an HDF5 file"):
        file = h5py.File(path if opened is None else opened, "r")
    with file:
        value = file.attrs.get(FORMAT_VERSION_ATTRIBUTE)
        if value != FORMAT_VERSION:
            raise CheckpointError(f"{path}: format_version is {value!r}; this dglkge reads {FORMAT_VERSION}")
        try:
            yield file
        except KeyError as error:
            raise CheckpointError(f"{path}: a dataset is missing ({error})") from None


def allocate_rows(group: h5py.Group, name: str, values: torch.Tensor) -> None:
    """Allocate space for rows in a new file, contiguous and uncompressed; the rows are written later.

    HDF5 itself writes none of the rows: on a full disk it can abort the process when it closes a file with
    rows in its buffers.
    """
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    # Early allocation fixes the offsets that the rows are written to. No fill: each row is written anyway.
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    group.create_dataset(name, shape=tuple(values.shape), dtype=file_dtype(values), dcpl=how)


def row_blocks(
    shape: tuple[int, ...], item_bytes: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[int, int]]:
    """Cut the rows of an array into (start, stop) ranges of about ``block_bytes`` each."""
    step = max(1, block_bytes // max(1, math.prod(shape[1:]) * item_bytes))
    for start in range(0, shape[0], step):
        yield start, min(shape[0], start + step)


def map_rows(path: Path | BinaryIO, dataset: h5py.Dataset) -> np.ndarray:
    """Map a contiguous dataset of a file into memory.

    The array is copy-on-write, so that torch may wrap it and no write reaches the file.
    """
    offset = dataset.id.get_offset()
    if dataset.size == 0 or offset is None:
        # An empty dataset has no offset in the file; a chunked or compressed one has several.
        return dataset[...]
    return np.memmap(path, dtype=dataset.dtype, mode="c", offset=offset, shape=dataset.shape)


def original_ids(path: Path | BinaryIO, file: h5py.File, first_id: int) -> np.ndarray:
    """Return the original id of each row; where there is none they count from ``first_id`` on."""
    if ORIGINAL_IDS in file:
        return map_rows(path, file[ORIGINAL_IDS])
    return np.arange(first_id, first_id + len(file[EMBEDDINGS]), dtype=np.int64)


def write_blob(group: h5py.Group, state: Mapping[str, Any]) -> None:
    """Write an optimizer's state as the ``torch.save`` bytes that PyTorch-BigGraph reads."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    # V1 is HDF5's opaque type of one byte, as in PyTorch-BigGraph's files. A string dataset would lose zero
    # bytes at its end.
    group.create_dataset(STATE_BLOB, data=np.frombuffer(buffer.getbuffer(), dtype="V1"))


def read_blob(dataset: h5py.Dataset) -> Any:
    """Read the bytes of :func:`write_blob` or of PyTorch-BigGraph without running code in them."""
    try:
        # Without weights_only a pickle from a stranger's checkpoint could run any code.
        return torch.load(io.BytesIO(dataset[...].tobytes()), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{dataset.file.filename}:{dataset.name}: refused, it holds more than tensors and plain values, "
            f"or is damaged ({one_line(error)})"
        ) from None


def shapes(file: h5py.File) -> dict[str, list[int]]:
    """Return the shape of every dataset by path."""
    paths: list[str] = []
    file.visit(paths.append)
    return {path: list(item.shape) for path in paths if isinstance(item := file[path], h5py.Dataset)}


def _is_narrow(values: torch.Tensor) -> bool:
    """Return whether rows are bfloat16 or float16, which files never have."""
    return values.dtype in (torch.bfloat16, torch.float16)


def _stored_array(values: torch.Tensor) -> np.ndarray:
    """View a tensor as an array, numbers of 16 bits as uint16 words."""
    array = values.detach()
    return array.view(torch.int16).numpy().view(np.uint16) if _is_narrow(values) else array.numpy()


def file_dtype(values: torch.Tensor) -> np.dtype:
    """Return the type in which a tensor is written."""
    # A slice of no rows: nothing is copied, whatever device the tensor is on.
    rows = values.detach()[:0].cpu()
    return (rows.float() if _is_narrow(values) else rows).numpy().dtype


def take_rows(values: torch.Tensor, order: np.ndarray, out: np.ndarray) -> None:
    """Write rows in a given order (n,) to an array (n, ...) of the type in which they are written."""
    if _is_narrow(values):
        row_kernels.widen_rows(_stored_array(values), order, values.dtype == torch.float16, out)
    else:
        np.take(_stored_array(values), order, axis=0, out=out, mode="clip")  # "raise" would copy once more


def put_rows(values: torch.Tensor, places: np.ndarray, block: np.ndarray) -> None:
    """Write rows of a file to some places (n,); rows of 16 bits get the nearest number, ties to even.

    What such a table was saved as is read back bit for bit.
    """
    if _is_narrow(values):
        block = _stored_array(torch.from_numpy(block).to(values.dtype))
    _stored_array(values)[places] = block


def global_sums_path(entity_type: str) -> str:
    """Return the dataset of Adagrad's sums (D,) of the global vector of an entity type.

    PyTorch-BigGraph does not look there.
    """
    return f"global_sums/{entity_type}"


def dense_path(kind: str, *names: str) -> str:
    """Return the dataset of a dense parameter (kind ``parameters``), or of a tensor of its optimizer."""
    return "/".join([DENSE_GROUP, kind, *names])


def dense_parameters(file: Any) -> dict[str, torch.Tensor]:
    """Return the dense parameters of an open model file, by name; none where the model has none."""
    group = file.get(dense_path("parameters"), {})
    return {name: torch.from_numpy(np.asarray(group[name][()])) for name in group}
