"""Names and formats of the files in a dataset folder: what the writer and the reader must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dglkge.errors import InputError

FORMAT_VERSION = 1
DESCRIPTION = "dataset.json"
RELATIONS = "relations.tsv"
PARTITIONS = "partitions"
SPLITS = ("train", "valid", "test")
TRAIN_WEIGHTS = "train_weights.npy"


def vocabulary_path(dataset: Path, entity_type: str) -> Path:
    """Return where the names of an entity type lie."""
    return dataset / "entities" / f"{entity_type}.txt"


def split_path(dataset: Path, split: str) -> Path:
    """Return where the triples of a split lie."""
    return dataset / f"{split}.npy"


def load_array(path: Path, shape: tuple[int | None, ...], dtype: type[np.generic]) -> np.ndarray:
    """Map an array of a dataset into memory, read-only.

    Parameters
    ----------
    path : Path
        A ``.npy`` file.
    shape : tuple of int or None
        The shape that it must have; None stands for any length.
    dtype : numpy type
        The type that it must have.

    Raises
    ------
    InputError
        If the file is missing, cut off, or holds something else.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise InputError(f"{path} is cut off or no array file: {error}") from error
    fits = array.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, array.shape))
    if not fits or array.dtype != dtype:
        raise InputError(
            f"{path} holds an array {array.shape} of {array.dtype}, "
            f"expected {shape} of {np.dtype(dtype).name}"
        )
    return array


def fingerprint(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of files' names and contents, in the given order, in hex."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
