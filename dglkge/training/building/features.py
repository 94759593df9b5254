"""Frozen vectors of entities for a run: copied to its folder by original id, mapped by all trainers.

One process of each disk writes the copy, before anything is trained; a resume takes the copy that is there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from dglkge.checkpoint import layout
from dglkge.checkpoint.features import open_features, parse_note, record_path
from dglkge.checkpoint.storage import file_crc32
from dglkge.config import Config
from dglkge.config.schema import FeaturesConfig
from dglkge.data.dataset import Dataset
from dglkge.data.vector_files import FeatureFile, VectorFile, feature_files, open_vectors
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.distributed.runtime import Cluster
from dglkge.errors import CheckpointError, InputError
from dglkge.model.projections import FeatureProjections, ProjectedFeatures
from dglkge.training.building.given_vectors import (
    match_names,
    nothing_matches,
    require_finite,
    together,
)

logger = logging.getLogger(__name__)

Records = Mapping[str, Tensor]


class RunFeatures(ProjectedFeatures):
    """Features of the entities of a run, and the records of their files, which every version has.

    Attributes
    ----------
    records : dict of str to (3,) int64 tensor
        By entity type: rows, numbers in each, and CRC-32 of the file.
    untrained_types : list of str
        Entity types without trained rows.
    """

    def __init__(
        self,
        projections: FeatureProjections,
        vectors: Mapping[str, np.ndarray],
        records: Records,
        are_alone: bool,
    ) -> None:
        super().__init__(projections, vectors)
        self.records = dict(records)
        self.untrained_types = self.entity_types if are_alone else []

    is_collective = False

    def state_dict(self) -> dict[str, Tensor]:
        """Return the records by dataset of a model file."""
        return {record_path(name): record.clone() for name, record in self.records.items()}

    def load_state_dict(self, state: h5py.File) -> None:
        """Compare the records with those of a model file."""
        for path, record in self.state_dict().items():
            saved = state[path][...].tolist() if path in state else None
            if saved != record.tolist():
                raise CheckpointError(
                    f"{state.filename} was trained with other features: rows, numbers and checksum {saved}, "
                    f"this run's folder has {record.tolist()}"
                )


def build_features(config: Config, cluster: Cluster, dataset: Dataset) -> RunFeatures | None:
    """Return the features of a run and their untrained projections; None without features. A collective."""
    chosen, world = config.features, cluster.world
    if chosen is None:
        return None
    folder = Path(config.output) / layout.FEATURES_FOLDER
    note = folder / layout.FEATURES_NOTE_FILE
    files = feature_files(chosen.files, dataset.entity_types, "features.files")
    # The barrier's limit allows for reading the largest of the files.
    largest = max((one.path for one in files), key=lambda path: path.stat().st_size if path.exists() else 0)

    def copy() -> None:
        if not world.is_disk_leader or _is_kept(config.output, chosen, files, note):
            return
        written = LeasedFolder(folder)
        written.make()
        with written.writing():
            _write(chosen, dataset, files, written, world.rank == 0)

    together(cluster, largest, copy)
    records, vectors = together(cluster, largest, lambda: _open(folder, note))
    described = {name: record.tolist() for name, record in records.items()}
    if len(set(cluster.gather_texts(json.dumps(described, sort_keys=True)))) > 1:
        raise InputError(f"{largest}: features.files are different files on the machines of the job")
    widths = {name: int(record[1]) for name, record in records.items()}
    dim, mlp = config.model.dimension, chosen.mlp
    layers = ((), "relu") if mlp is None else (mlp.hidden or (dim,), mlp.activation)
    made = FeatureProjections(widths, dim, *layers, config.seed)
    return RunFeatures(made, vectors, records, chosen.use == "alone")


def _is_kept(output: str, chosen: FeaturesConfig, files: list[FeatureFile], note: Path) -> bool:
    """Return whether the copy in the run's folder is taken as it is.

    That of a run with a checkpoint is: the checkpoint has its checksum. One that a start left which trained
    nothing may be of other files, and is taken only where these are not there (any more).
    """
    if not note.is_file():
        return False
    if (Path(output) / layout.CHECKPOINT_FOLDER / layout.VERSION_FILE).is_file():
        return True
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        is_same = json.loads(note.read_text(encoding="utf-8"))["files"] == list(chosen.files)
        return is_same and not all(one.path.is_file() for one in files)
    return False


def _open(folder: Path, note: Path) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """Open the run's copy."""
    try:
        records = parse_note(note.read_bytes(), note)
        vectors = open_features(folder, records)
    except (OSError, CheckpointError) as error:
        raise InputError(f"{error}; remove {note} to copy the files anew") from None
    return {name: torch.tensor(record) for name, record in records.items()}, vectors


def _write(
    chosen: FeaturesConfig, dataset: Dataset, files: list[FeatureFile], folder: LeasedFolder, reports: bool
) -> None:
    """Copy the vectors of all entities to the run's folder; the note comes last."""
    types: dict[str, Any] = {}
    for one in files:
        file = open_vectors(one.path, chosen.names, chosen.entity_column, chosen.vector_column)
        ids = {name: np.arange(dataset.num_entities(name)) for name in one.entity_types}
        _, matches = match_names(file, dataset, ids)
        if not any(len(numbers) for numbers, _ in matches.values()):
            raise nothing_matches(file, dataset, one.entity_types)
        for name, (numbers, places) in matches.items():
            if not len(numbers):
                continue
            num_rows = dataset.num_entities(name)
            crc32 = _write_type(file, numbers, places, num_rows, chosen.dtype, folder.path, name)
            types[name] = {
                "path": str(one.path),
                "shape": [num_rows, file.width],
                "with_vector": len(places),
                "without": num_rows - len(places),
                "crc32": crc32,
            }
            if reports:
                logger.info(
                    "features of %s from %s: %d numbers each; %d entities with a vector, %d without "
                    "(theirs is 0)",
                    *(name, one.path, file.width, len(places), num_rows - len(places)),
                )
    described = {"files": list(chosen.files), "dtype": chosen.dtype, "types": types}
    folder.write_json(layout.FEATURES_NOTE_FILE, described)


def _write_type(
    file: VectorFile,
    numbers: np.ndarray,
    places: np.ndarray,
    num_rows: int,
    dtype: str,
    folder: Path,
    name: str,
) -> int:
    """Write the vectors of one entity type, 0 where there is none; returns the file's CRC-32."""
    target = folder / layout.features_array(name)
    temporary = target.with_name(target.name + layout.TEMPORARY_SUFFIX)
    written = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=(num_rows, file.width))
    # Entities whose names a format makes equal share a vector: numbers may repeat.
    for some, rows in file.rows(np.unique(numbers)):
        with np.errstate(over="ignore"):
            narrowed = rows.astype(dtype)
        require_finite(file, some, rows, np.isfinite(narrowed), f"finite numbers of {dtype}")
        first, end = np.searchsorted(numbers, [some[0], some[-1] + 1])
        written[places[first:end]] = narrowed[np.searchsorted(some, numbers[first:end])]
    written.flush()
    del written
    os.replace(temporary, target)
    return file_crc32(target)
