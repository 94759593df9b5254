"""A dataset folder written by hand, so that the reader is tested without the writer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

TRAIN = np.array([[0, 0, 1], [1, 0, 2], [3, 1, 0], [0, 2, 0], [2, 2, 1]])
"""Relations 0 and 1 join person and person, relation 2 joins person and town."""

VALID = np.array([[2, 1, 3]])
PERSONS = ["Ada", "Bob", "NA", " Eve "]
TOWNS = ["Rome", "Ōsaka"]
RELATIONS = [("knows", "person", "person"), ("near", "person", "person"), ("near", "person", "town")]

NODE_IDS = {"person": [2, 0, 3, 1], "town": [1, 0], "relation": [0, 2, 1]}
"""Node id of each original id."""

BOUNDARIES = {"person": [0, 2, 4], "relation": [0, 2, 3], "town": [0, 1, 2]}
"""First node id of each of the two partitions, and the end."""

NODE_MAP = {"person": [[0, 2], [5, 7]], "relation": [[2, 4], [7, 8]], "town": [[4, 5], [8, 9]]}
"""Ranges as DGL counts them: over all types of partition 0, then over those of partition 1."""


def write_toy_folder(folder: Path, has_weights: bool = False) -> Path:
    (folder / "entities").mkdir(parents=True)
    for type_, names in (("person", PERSONS), ("town", TOWNS)):
        (folder / "entities" / f"{type_}.txt").write_bytes("".join(f"{name}\n" for name in names).encode())
    (folder / "relations.tsv").write_text("".join("\t".join(r) + "\n" for r in RELATIONS))
    for split, triples in (("train", TRAIN), ("valid", VALID), ("test", np.zeros((0, 3), np.int64))):
        np.save(folder / f"{split}.npy", triples)
    if has_weights:
        np.save(folder / "train_weights.npy", np.arange(len(TRAIN), dtype=np.float32))
    write_toy_partitions(folder / "partitions", has_weights)
    description = {
        "format_version": 1, "name": "toy", "graph_name": "toy", "num_parts": 2, "part_method": "random",
        "entity_types": {"person": 4, "town": 2}, "num_relations": 3,
        "splits": {"train": 5, "valid": 1, "test": 0},
        "edge_types": [["person", "person", 0, 3], ["person", "town", 3, 5]], "has_weights": has_weights,
        "fingerprint": "f" * 64, "seed": 0, "unseen": {}, "duplicates": {}, "ids": "names",
        "created_by": "a test",
    }  # fmt: skip
    (folder / "dataset.json").write_text(json.dumps(description))
    return folder


def write_toy_partitions(folder: Path, has_weights: bool) -> None:
    """Write the id maps, the edge tables and DGL's description, but none of DGL's binary files."""
    folder.mkdir()
    (folder / "toy.json").write_text(json.dumps({"num_parts": 2, "node_map": NODE_MAP}))
    for ntype, ids in NODE_IDS.items():
        np.save(folder / f"node_ids_{ntype}.npy", np.array(ids))
        np.save(folder / f"original_ids_{ntype}.npy", np.argsort(ids))
    edges, owners = [], []
    for head, relation, tail in TRAIN.tolist():
        rhs = RELATIONS[relation][2]
        edges.append([NODE_IDS["person"][head], NODE_IDS["relation"][relation], NODE_IDS[rhs][tail]])
        owners.append(edges[-1][2] >= BOUNDARIES[rhs][1])
    for part_id in range(2):
        part, rows = folder / f"part{part_id}", np.flatnonzero(np.array(owners) == part_id)
        part.mkdir()
        np.save(part / "triple_ids.npy", rows)
        np.save(part / "edges.npy", np.array(edges)[rows])
        if has_weights:
            np.save(part / "weights.npy", rows.astype(np.float32))
