"""Models of the Hugging Face hub: a folder as tables, without a package; upload and download."""

from __future__ import annotations

import contextlib
import json
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.data.dataset_files import load_json
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError, import_extra, one_line
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


def map_tensors(path: Path, needed: Sequence[str]) -> dict[str, np.ndarray]:
    """Map the float32 tensors of a safetensors file by name, copy-on-write; needed ones have to be there."""
    try:
        with open(path, "rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            # A damaged length must not make read() allocate terabytes.
            if header_bytes > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(header_bytes))
        tensors: dict[str, np.ndarray] = {}
        for name, tensor in header.items():
            if tensor.get("dtype") == "F32":
                offset = 8 + header_bytes + tensor["data_offsets"][0]
                tensors[name] = np.memmap(path, "<f4", "c", offset, tuple(tensor["shape"]))
        absent = [name for name in needed if name not in tensors]
        if absent:
            raise ValueError(f"it has no {absent[0]!r} in float32")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        names = ", ".join(map(repr, needed))
        raise InputError(f"{path} is damaged or has no tensor {names}: {error}") from None
    return tensors


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
        counts, prefix = {**meta.entity_types, RELATION: len(relations)}, dense_tensor("")
        tensors = map_tensors(folder / TENSORS, list(counts))
        for table, count in counts.items():
            if tensors[table].ndim != 2 or len(tensors[table]) != count:
                raise InputError(
                    f"{folder / TENSORS}: tensor {table!r} has shape {tensors[table].shape}, {CONFIG} says "
                    f"{count} rows"
                )
        self._dense = {
            name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)
        }
        super().__init__(folder, meta, {table: torch.from_numpy(tensors[table]) for table in counts})

    def dense_parameters(self) -> dict[str, torch.Tensor]:
        """Return the dense parameters of the score function's module by name; none where it has none."""
        return {name: torch.from_numpy(np.array(values)) for name, values in self._dense.items()}

    def _read_names(self, entity_type: str, count: int) -> Vocabulary:
        path = self.path / names_file(entity_type)
        names = Vocabulary.load(path, "entity")
        if len(names) != count:
            raise InputError(f"{path} has {len(names)} names, expected {count}")
        return names


HUB_URL = re.compile(r"hf://([^/@]+/[^/@]+)(?:@(.+))?")
"""``hf://USER/MODEL``, with a revision after ``@``."""


@contextlib.contextmanager
def _hub(user: str) -> Iterator[Any]:
    """Provide ``huggingface_hub``; what the hub or the network refuses is an :class:`InputError`."""
    module = import_extra(user, "huggingface_hub", "huggingface")
    try:
        yield module
    except Exception as error:
        # Refusals of the hub and failures of the network are errors of whichever HTTP library it uses.
        is_http = any(base.__name__ == "HTTPError" for base in type(error).__mro__)
        if not is_http and not isinstance(error, (ValueError, OSError)):
            raise
        raise InputError(f"{user}: {one_line(error)}") from None


def push(write: Callable[[Path], object], name: str, private: bool) -> str:
    """Upload the folder that a function writes; see :meth:`dglkge.inference.run.Run.push_to_hub`."""
    with _hub(f"push_to_hub {name}") as hub, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write(folder)
        hub.create_repo(name, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=name, folder_path=folder).commit_url)


def download(path: str) -> str:
    """Return the folder of a model of the hub in the user's cache; other paths as they are."""
    match = HUB_URL.fullmatch(path)
    if match is None:
        return path
    with _hub(path) as hub:
        return str(hub.snapshot_download(match[1], revision=match[2]))
