"""Triples of ids: entities are numbered in each type, or over all; the ids are kept. OGB's folders have them.

Of OGB these are the link prediction data sets with relations, ogbl-wikikg2 and ogbl-biokg.
``split/*/train.pt``, ``valid.pt`` and ``test.pt`` hold head, relation and tail; valid and test also
``head_neg`` and ``tail_neg``, the entities that OGB ranks each triple among. In ogbl-biokg entities have
types and are numbered in each type. ``mapping/`` has the names.
"""

from __future__ import annotations

import pickle
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dglkge.data.dataset_files import SPLITS, TRAIN
from dglkge.data.text_format import Columns, read_errors
from dglkge.errors import InputError
from dglkge.partition.entity_types import type_names
from dglkge.partition.ingest import IdTriples, Reading, Types, Watch
from dglkge.partition.name_index import MAX_NAMES
from dglkge.partition.readers.id_folders import IdFolder


@dataclass
class Numbered:
    """Triples of ids (n, 3), entities counted over all types, with names by id (None: the ids themselves).

    ``types`` has the entity types, and the index of each entity's.
    """

    triples: np.ndarray
    entities: Sequence[str] | None = None
    relations: Sequence[str] | None = None
    types: Types | None = None


def type_ranges(counts: Mapping[str, int]) -> tuple[dict[str, int], np.ndarray]:
    """Count entities of several types as one range of numbers: type after type, in the order of their names.

    Returns the number of the first entity of each type, and the index (n,) int32 of each entity's type.
    """
    order = sorted(counts)
    lengths = [counts[name] for name in order]
    starts = dict(zip(order, np.cumsum([0, *lengths]).tolist()))
    return starts, np.repeat(np.arange(len(order), dtype=np.int32), lengths)


def as_array(values: Any) -> np.ndarray:
    """Return an array of numpy or torch, on any device, as numpy's."""
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def numbers(count: int) -> list[str]:
    """Return the numbers from 0 on as names."""
    return [str(number) for number in range(count)]


def numbered_edges(edges: Mapping[Any, np.ndarray], counts: Mapping[str, int]) -> Numbered:
    """Return the edges (2, n) of each edge type (type, relation, type); numbers are names."""
    starts, type_of = type_ranges(counts)
    relations = sorted({edge_type[1] for edge_type in edges})
    blocks = [np.zeros((0, 3), np.int64)]
    for (head_type, relation, tail_type), (heads, tails) in edges.items():
        number = np.full(len(heads), relations.index(relation))
        blocks.append(np.stack([heads + starts[head_type], number, tails + starts[tail_type]], axis=1))
    names = [name for node_type in starts for name in numbers(counts[node_type])]
    types = type_names(list(starts)), type_of
    return Numbered(np.concatenate(blocks), names, [str(name) for name in relations], types)


def row_place(split: str, row: int) -> str:
    """Return where a row of an object is, for messages."""
    return f"{split}: row {row + 1}"


def joined(numbered: Mapping[str, Numbered]) -> Reading:
    """Return the triples of all splits; an id out of range, or splits of other entities are an InputError."""
    first, names = numbered[TRAIN], []
    for split, source in numbered.items():
        if (source.entities, source.relations) != (first.entities, first.relations):
            fault = "its entities or relations have other names"
            raise InputError(f"the ids of {split} are not those of train: {fault}")
    num_triples = sum(len(source.triples) for source in numbered.values())
    for columns, noun, known in (([0, 2], "entity", first.entities), ([1], "relation", first.relations)):
        end, largest = MAX_NAMES if known is None else len(known), -1
        for split, source in numbered.items():
            ids = source.triples[:, columns]
            bad = np.flatnonzero(((ids < 0) | (ids >= end)).any(axis=1))
            if len(bad):
                fault = f"the {noun} ids are {ids[bad[0]].tolist()}, allowed is 0 to {end - 1}"
                raise InputError(f"{row_place(split, bad[0])}: {fault}")
            largest = max(largest, int(ids.max()) if len(ids) else -1)
        if known is None and largest >= max(8 * num_triples, 1000):
            fault = f"the {noun} ids reach {largest:,}, and there are {num_triples:,} triples"
            advice = "each id up to the largest gets a row; number them from 0, or give names (a data frame)"
            raise InputError(f"{fault}: {advice}")
        names.append(numbers(largest + 1) if known is None else known)
    splits = {split: source.triples.astype(np.int32) for split, source in numbered.items()}
    if not len(splits[TRAIN]):
        raise InputError("train has no triples")
    triples, is_of_ids = IdTriples(names[0], names[1], splits), first.entities is None
    return Reading(triples, first.types, Columns() if is_of_ids else None, row_place, is_of_ids)


_ENTITIES = "nodeidx2entityid.csv.gz"
_TYPED_ENTITIES = "_entidx2name.csv.gz"
_RELATIONS = ("reltype2relid.csv.gz", "relidx2relname.csv.gz")


def find_ogb(folder: Path) -> IdFolder | None:
    """Return OGB's files in a folder, or None."""
    train = sorted(folder.glob("split/*/train.pt"))
    if not train:
        return None
    files = {split: train[0].with_name(f"{split}.pt") for split in SPLITS}
    return IdFolder("an OGB data set", files, lambda watch, _: _read_ogb(folder, files, watch))


def _read_ogb(folder: Path, files: Mapping[str, Path], watch: Watch) -> Reading:
    paths = [folder / "mapping" / name for name in _RELATIONS]
    relations = next(filter(Path.is_file, paths), None)
    if relations is None:
        either = " nor mapping/".join(_RELATIONS)
        raise InputError(f"{folder}: there is neither mapping/{either}, which have the relations")
    by_type = _ogb_entity_names(folder)
    starts, type_of = type_ranges({name: len(names) for name, names in by_type.items()})
    splits, candidates = {}, {}
    for split, path in files.items():
        content = _load_arrays(path)
        watch(path, path.stat().st_size)
        columns = [np.asarray(content[role], np.int64) for role in ("head", "relation", "tail")]
        for place, role in ((0, "head"), (2, "tail")):
            if f"{role}_type" in content:
                columns[place] = columns[place] + _type_starts(content[f"{role}_type"], starts, path)
        splits[split] = np.stack(columns, axis=1).astype(np.int32)
        if split != TRAIN:
            candidates[split] = np.stack([np.asarray(content["head_neg"]), np.asarray(content["tail_neg"])])
    names = [name for entity_type in starts for name in by_type[entity_type]]
    triples, figures = IdTriples(names, _ogb_names(relations), splits), {"layout": "split/, mapping/"}
    notes = ["each triple of valid and test has candidates: dglkge evaluate RUN --candidates given"]
    return Reading(triples, (list(starts), type_of), candidates=candidates, figures=figures, notes=notes)


def _ogb_entity_names(folder: Path) -> dict[str, list[str]]:
    """Return the names of the entities of each type by id."""
    mapping = folder / "mapping"
    if (mapping / _ENTITIES).is_file():
        return {"entity": _ogb_names(mapping / _ENTITIES)}
    paths = sorted(mapping.glob(f"*{_TYPED_ENTITIES}"))
    if not paths:
        raise InputError(f"{folder}: there is neither mapping/{_ENTITIES} nor mapping/TYPE{_TYPED_ENTITIES}")
    return {path.name.removesuffix(_TYPED_ENTITIES): _ogb_names(path) for path in paths}


def _ogb_names(path: Path) -> list[str]:
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
        module = module.replace("numpy.core", "numpy._core")
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no array")
        return super().find_class(module, name)


_ALLOWED = {
    "numpy": ("ndarray", "dtype"),
    "numpy._core.multiarray": ("_reconstruct",),
    "numpy._core.numeric": ("_frombuffer",),
    "_codecs": ("encode",),
    "collections": ("OrderedDict",),
    "torch._utils": ("_rebuild_tensor_v2",),
}
ARRAYS_ONLY = types.SimpleNamespace(__name__="arrays_only", Unpickler=ArraysOnly)
ARRAYS_ONLY.load = lambda file, **options: ArraysOnly(file, **options).load()
"""In place of the module pickle, for torch."""


def _load_arrays(path: Path) -> Mapping[str, Any]:
    """Read what torch has saved, in any version of its format; no code of the file runs."""
    import torch

    with read_errors(path, Exception):
        content: Mapping[str, Any] = torch.load(path, weights_only=False, pickle_module=ARRAYS_ONLY)
    missing = [role for role in ("head", "relation", "tail") if role not in content]
    if missing:
        raise InputError(f"{path} has no {' and '.join(missing)}: it is no graph with relations")
    return content


def _type_starts(entity_types: Any, starts: Mapping[str, int], path: Path) -> np.ndarray:
    """Return the number of the first entity of each row's type."""
    codes, names = pd.factorize(np.asarray(entity_types, dtype=object))
    unknown = [name for name in names if name not in starts]
    if unknown:
        raise InputError(f"{path}: mapping/ has no entities of the type {unknown[0]!r}")
    return np.array([starts[name] for name in names])[codes]
