"""Reads a dataset folder back into names, by the files alone, and without any code of the project."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np


def lines(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\n")[:-1]


def named_triples(dataset: Path, split: str) -> list[tuple[str, str, str]]:
    """Return head, relation and tail of each triple by name, in the order of the file."""
    relations = [line.split("\t") for line in lines(dataset / "relations.tsv")]
    names = {path.stem: lines(path) for path in (dataset / "entities").glob("*.txt")}
    triples = []
    for head, relation, tail in np.load(dataset / f"{split}.npy").tolist():
        name, lhs, rhs = relations[relation]
        triples.append((names[lhs][head], name, names[rhs][tail]))
    return triples


def owned_triples(dataset: Path) -> list[Counter]:
    """Return, for each partition, the named triples of its ``edges.npy``, going through the id maps."""
    description = json.loads((dataset / "dataset.json").read_text())
    partitions = dataset / "partitions"
    relations = [line.split("\t") for line in lines(dataset / "relations.tsv")]
    names = {path.stem: lines(path) for path in (dataset / "entities").glob("*.txt")}
    original = {ntype: np.load(partitions / f"original_ids_{ntype}.npy") for ntype in [*names, "relation"]}
    parts = []
    for part_id in range(description["num_parts"]):
        edges = np.load(partitions / f"part{part_id}" / "edges.npy").tolist()
        triples: Counter = Counter()
        for head, relation, tail in edges:
            name, lhs, rhs = relations[original["relation"][relation]]
            triples[names[lhs][original[lhs][head]], name, names[rhs][original[rhs][tail]]] += 1
        parts.append(triples)
    return parts
