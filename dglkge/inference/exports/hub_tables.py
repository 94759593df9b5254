"""A folder for the Hugging Face hub as tables of a model: file names, fields, reading. No package needed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.data.dataset_files import load_json
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError
from dglkge.inference.whole_tables import WholeTables
from dglkge.typing import RELATION, Relation

LIBRARY = "dglkge"
LIBRARY_FIELD = "library_name"
CONFIG = "config.json"
CARD = "README.md"
TENSORS = "model.safetensors"
"""The name that the hub expects of a model's tensors."""

HUB_FIELDS = {
    "config": "training",
    "dataset_name": "dataset_name",
    "dataset_fingerprint": "dataset_fingerprint",
    "entity_types": "entity_types",
    "progress": "progress",
    "seed": "seed",
    "score_function": "score_function",
    "dim": "dimension",
    "reciprocal": "reciprocal_relations",
    "optimizer": "optimizer",
    "versions": "versions",
    "score_options": "score_options",
}
"""Attribute of a checkpoint's description to its field in config.json."""

RELATIONS_FIELD = "relations"


def names_file(table: str) -> str:
    """Return the file of a table's names."""
    return f"{table}.names.txt"


def is_hub_folder(folder: Path) -> bool:
    """Return whether a folder holds a model that ``dglkge checkpoint export --format huggingface`` wrote."""
    if not (folder / TENSORS).is_file() or not (folder / CONFIG).is_file():
        return False
    return load_json(folder / CONFIG).get(LIBRARY_FIELD) == LIBRARY


def dense_tensor(name: str) -> str:
    """Return the tensor of a dense parameter of the score function's module; no entity type has a '/'."""
    return f"dense/{name}"


def tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors of a safetensors file."""
    try:
        return [name for name in _header(path)[0] if name != "__metadata__"]
    except (OSError, ValueError, struct.error) as error:
        raise InputError(f"{path} is damaged: {error}") from None


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where the tensors begin."""
    with open(path, "rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        # A damaged length must not make read() allocate terabytes.
        if header_bytes > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header: dict[str, Any] = json.loads(file.read(header_bytes))
        return header, 8 + header_bytes


def map_tensor(path: Path, name: str) -> np.ndarray:
    """Map one tensor of a safetensors file, copy-on-write."""
    try:
        header, start = _header(path)
        tensor = header[name]
        if tensor["dtype"] != "F32":
            raise ValueError(f"dtype is {tensor['dtype']}, expected F32")
        offset = start + tensor["data_offsets"][0]
        return np.memmap(path, dtype="<f4", mode="c", offset=offset, shape=tuple(tensor["shape"]))
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise InputError(f"{path} is damaged or has no tensor {name!r}: {error}") from None


class HubTables(WholeTables):
    """Tables of a folder for the hub."""

    def __init__(self, folder: Path) -> None:
        config = load_json(folder / CONFIG)
        try:
            facts: dict[str, Any] = {name: config[field] for name, field in HUB_FIELDS.items()}
            relations = [Relation(*relation) for relation in config[RELATIONS_FIELD]]
        except (KeyError, TypeError) as error:
            raise InputError(f"{folder / CONFIG} is damaged: {error!r}") from None
        # Modules to import would be code of a stranger: the folder may come from the hub.
        facts["config"].pop("imports", None)
        meta = CheckpointMeta(**facts, relations=relations, dataset_path="")
        for table in meta.entity_types:
            if Path(names_file(table)).name != names_file(table):
                raise InputError(f"{folder / CONFIG} is damaged: {table!r} is no name of an entity type")
        tables = {}
        for table, count in {**meta.entity_types, RELATION: len(relations)}.items():
            tables[table] = torch.from_numpy(map_tensor(folder / TENSORS, table))
            if tables[table].ndim != 2 or len(tables[table]) != count:
                raise InputError(
                    f"{folder / TENSORS}: tensor {table!r} has shape {tuple(tables[table].shape)}, {CONFIG} "
                    f"says {count} rows"
                )
        super().__init__(folder, meta, tables)

    def dense_parameters(self) -> dict[str, torch.Tensor]:
        """Return the dense parameters of the score function's module by name; none where it has none."""
        path, prefix = self.path / TENSORS, dense_tensor("")
        names = [name for name in tensor_names(path) if name.startswith(prefix)]
        return {name[len(prefix) :]: torch.from_numpy(np.array(map_tensor(path, name))) for name in names}

    def _read_names(self, entity_type: str, count: int) -> Vocabulary:
        path = self.path / names_file(entity_type)
        names = Vocabulary.load(path, "entity")
        if len(names) != count:
            raise InputError(f"{path} has {len(names)} names, expected {count}")
        return names
