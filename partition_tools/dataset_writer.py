"""Writes vocabularies, relations and splits of a dataset folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.data import dataset_files
from dglkge.data.vocabulary import Vocabulary
from partition_tools.ingest import IdTriples
from partition_tools.split_counts import count_duplicates, count_unseen
from partition_tools.staging import PENDING_DESCRIPTION
from partition_tools.typed_ids import TypedIds

_ROWS_AT_A_TIME = 1 << 20


def write_triples(folder: Path, triples: IdTriples, ids: TypedIds) -> dict[str, Any]:
    """Write everything but the partitions.

    Parameters
    ----------
    folder : Path
        The empty folder of the dataset to be.
    triples : IdTriples
        All splits.
    ids : TypedIds
        The plan of the original ids.

    Returns
    -------
    dict
        What ``dataset.json`` says about them.
    """
    paths = []
    for index, type_ in enumerate(ids.types):
        path = dataset_files.vocabulary_path(folder, type_)
        path.parent.mkdir(exist_ok=True)
        Vocabulary([triples.entities[i] for i in ids.entities_of(index).tolist()], "entity").save(path)
        paths.append(path)
    ids.relations.save(folder / dataset_files.RELATIONS)
    paths.append(folder / dataset_files.RELATIONS)
    splits = {split: triples.splits.get(split, np.zeros((0, 3), np.int32)) for split in dataset_files.SPLITS}
    relation_ids = {split: ids.relation_ids(rows) for split, rows in splits.items()}
    train_pairs = ids.pair_ranks()[relation_ids["train"]]
    order = None if len(ids.types) == 1 else np.argsort(train_pairs, kind="stable")
    for split, rows in splits.items():
        path = dataset_files.split_path(folder, split)
        _write_split(path, rows, ids, order if split == "train" else None)
        paths.append(path)
    weights = triples.weights.get("train")
    if weights is not None:
        path = folder / dataset_files.TRAIN_WEIGHTS
        np.save(path, weights if order is None else weights[order])
        paths.append(path)
    return {
        "entity_types": ids.num_entities(),
        "num_relations": len(ids.relations),
        "splits": {split: len(rows) for split, rows in splits.items()},
        "edge_types": _edge_types(ids, train_pairs),
        "has_weights": weights is not None,
        "fingerprint": dataset_files.fingerprint(paths),
        "unseen": count_unseen(splits, relation_ids, len(triples.entities), len(ids.relations)),
        "duplicates": {split: count_duplicates(rows) for split, rows in splits.items()},
    }


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Write what becomes ``dataset.json``, and makes the folder a dataset, when the folder gets its name."""
    content = {"format_version": dataset_files.FORMAT_VERSION, **description}
    with open(folder / PENDING_DESCRIPTION, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _write_split(path: Path, rows: np.ndarray, ids: TypedIds, order: np.ndarray | None) -> None:
    # In pieces, so that the 64-bit ids of a large split need no memory. Written, not mapped: on a full disk
    # a write is an error with a message, and the first page of a mapped file that has no room is a bus error.
    with open(path, "wb") as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": (len(rows), 3)}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(rows), _ROWS_AT_A_TIME):
            piece = slice(start, start + _ROWS_AT_A_TIME)
            ids_of_piece = ids.original_ids(rows[piece] if order is None else rows[order[piece]])
            file.write(np.ascontiguousarray(ids_of_piece, dtype="<i8").tobytes())


def _edge_types(ids: TypedIds, train_pairs: np.ndarray) -> list[list[Any]]:
    """Return lhs, rhs, first and end triple id of each pair of types that training triples join."""
    ranks = ids.pair_ranks()
    counts = np.bincount(train_pairs, minlength=int(ranks.max()) + 1)
    ends = np.cumsum(counts)
    edge_types = []
    for rank, (count, end) in enumerate(zip(counts.tolist(), ends.tolist())):
        relation = ids.relations[int(np.flatnonzero(ranks == rank)[0])]
        if count:
            edge_types.append([relation.lhs, relation.rhs, end - count, end])
    return edge_types
