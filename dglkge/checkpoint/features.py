"""Files of the frozen vectors of entities in a run's folder, one npy file of each entity type by original id.

They are written once, before the first version, and a note that lists them after that. Every version refers
to them by their checksum.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dglkge.checkpoint import layout
from dglkge.checkpoint.hdf5_format import dense_path
from dglkge.checkpoint.storage import file_crc32
from dglkge.data.partition_layout import map_npy
from dglkge.errors import CheckpointError

RECORD = "features"
"""Kind of the datasets, beside the dense parameters, that hold the record of each file."""


def record_path(entity_type: str) -> str:
    """Return the dataset of the record of a type's file, (3,) int64: rows, numbers in each, and CRC-32."""
    return dense_path(RECORD, entity_type)


def parse_note(content: bytes, place: object) -> dict[str, list[int]]:
    """Return the records of the files that a note lists, by entity type, as of :func:`record_path`."""
    try:
        types = json.loads(content)["types"]
        return {name: [*map(int, note["shape"]), int(note["crc32"])] for name, note in types.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{place} is damaged: {error!r}") from None


def open_features(
    folder: Path, records: Mapping[str, Sequence[int]], verify: bool = False
) -> dict[str, np.ndarray]:
    """Map the vectors of some entity types, which have the records of :func:`record_path`.

    CheckpointError if a file is missing, damaged or another one. Checksums are compared only if wanted, which
    reads all files.
    """
    arrays = {}
    for name, (num_rows, width, crc32) in records.items():
        path = folder / layout.features_array(name)
        vectors = map_npy(path, CheckpointError)
        if vectors.shape != (num_rows, width):
            raise CheckpointError(f"{path} has shape {vectors.shape}, expected {(num_rows, width)}")
        if verify and file_crc32(path) != crc32:
            raise CheckpointError(f"{path} is damaged, or not the file that the checkpoint was trained with")
        arrays[name] = vectors
    return arrays
