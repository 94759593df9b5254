"""Reads the link prediction data sets of OGB with relations: ogbl-wikikg2 and ogbl-biokg.

``split/*/train.pt``, ``valid.pt`` and ``test.pt`` hold head, relation and tail; valid and test also
``head_neg`` and ``tail_neg``, the entities that OGB ranks each triple among. In ogbl-biokg entities have
types and are numbered in each type. ``mapping/`` has the names.
"""

from __future__ import annotations

import pickle
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dglkge.data.dataset_files import SPLITS, TRAIN
from dglkge.data.text_format import read_errors
from dglkge.errors import InputError
from dglkge.partition.ingest import IdTriples, Reading, Watch
from dglkge.partition.readers.id_folders import IdFolder
from dglkge.partition.readers.numbered import type_ranges

_ENTITIES = "nodeidx2entityid.csv.gz"
_TYPED_ENTITIES = "_entidx2name.csv.gz"
_RELATIONS = ("reltype2relid.csv.gz", "relidx2relname.csv.gz")


def find_ogb(folder: Path) -> IdFolder | None:
    """Return OGB's files in a folder, or None."""
    train = sorted(folder.glob("split/*/train.pt"))
    if not train:
        return None
    files = {split: train[0].with_name(f"{split}.pt") for split in SPLITS}
    return IdFolder("an OGB data set", files, lambda watch, _: _read(folder, files, watch))


def _read(folder: Path, files: Mapping[str, Path], watch: Watch) -> Reading:
    paths = [folder / "mapping" / name for name in _RELATIONS]
    relations = next((path for path in paths if path.is_file()), None)
    if relations is None:
        raise InputError(
            f"{folder}: there is neither mapping/{' nor mapping/'.join(_RELATIONS)}, which have the relations"
        )
    contents = {}
    for split, path in files.items():
        contents[split] = _load(path)
        watch(path)(path.stat().st_size)
    by_type = _entity_names(folder)
    starts, type_of = type_ranges({name: len(names) for name, names in by_type.items()})
    splits, candidates = {}, {}
    for split, content in contents.items():
        columns = [np.asarray(content[role], np.int64) for role in ("head", "relation", "tail")]
        for place, role in ((0, "head"), (2, "tail")):
            if f"{role}_type" in content:
                columns[place] = columns[place] + _starts(content[f"{role}_type"], starts, files[split])
        splits[split] = np.stack(columns, axis=1).astype(np.int32)
        if split != TRAIN:
            candidates[split] = np.stack([np.asarray(content["head_neg"]), np.asarray(content["tail_neg"])])
    names = [name for entity_type in starts for name in by_type[entity_type]]
    return Reading(
        IdTriples(names, _names(relations), splits),
        types=(list(starts), type_of),
        candidates=candidates,
        figures={"layout": "split/, mapping/"},
        notes=["each triple of valid and test has candidates: dglkge evaluate RUN --candidates given"],
    )


def _entity_names(folder: Path) -> dict[str, list[str]]:
    """Return the names of the entities of each type by id."""
    mapping = folder / "mapping"
    if (mapping / _ENTITIES).is_file():
        return {"entity": _names(mapping / _ENTITIES)}
    paths = sorted(mapping.glob(f"*{_TYPED_ENTITIES}"))
    if not paths:
        raise InputError(
            f"{folder}: there is neither mapping/{_ENTITIES} nor a file mapping/TYPE{_TYPED_ENTITIES}"
        )
    return {path.name.removesuffix(_TYPED_ENTITIES): _names(path) for path in paths}


def _names(path: Path) -> list[str]:
    """Read a table of id and name with a header; the names by id."""
    with read_errors(path, ValueError):
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    ids = pd.to_numeric(table.iloc[:, 0], errors="coerce").to_numpy()
    if table.shape[1] < 2 or not np.array_equal(np.sort(ids), np.arange(len(ids))):
        raise InputError(f"{path}: expected a line with id and name for each of 0 to {len(ids) - 1}")
    return table.iloc[np.argsort(ids), 1].tolist()


class ArraysOnly(pickle.Unpickler):
    """Reads arrays, tensors, lists and dicts; a file that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few functions that arrays are made with."""
        if (module.replace("numpy.core", "numpy._core"), name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no array")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


_ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
}
ARRAYS_ONLY = types.SimpleNamespace(
    __name__="arrays_only",
    Unpickler=ArraysOnly,
    load=lambda file, **options: ArraysOnly(file, **options).load(),
)
"""In place of the module pickle, for torch."""


def _load(path: Path) -> Mapping[str, Any]:
    """Read what torch has saved, in any version of its format; no code of the file runs."""
    import torch

    with read_errors(path, Exception):
        content: Mapping[str, Any] = torch.load(path, weights_only=False, pickle_module=ARRAYS_ONLY)
    missing = [role for role in ("head", "relation", "tail") if role not in content]
    if missing:
        raise InputError(f"{path} has no {' and '.join(missing)}: it is no graph with relations")
    return content


def _starts(entity_types: Any, starts: Mapping[str, int], path: Path) -> np.ndarray:
    """Return the number of the first entity of each row's type."""
    codes, names = pd.factorize(np.asarray(entity_types, dtype=object))
    unknown = [name for name in names if name not in starts]
    if unknown:
        raise InputError(f"{path}: mapping/ has no entities of the type {unknown[0]!r}")
    return np.array([starts[name] for name in names])[codes]
