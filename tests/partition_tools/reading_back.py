"""Reads a dataset folder back into names, by the files alone, and without any code of the project."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np


def lines(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\n")[:-1]


def named(dataset: Path, triples: np.ndarray, original_ids: dict | None = None) -> list[tuple[str, ...]]:
    """Return head, relation and tail of triples by name, and the time if there is one."""
    relations = [line.split("\t") for line in lines(dataset / "relations.tsv")]
    names = {path.stem: lines(path) for path in (dataset / "entities").glob("*.txt")}
    times = lines(dataset / "times.txt") if (dataset / "times.txt").exists() else []
    rows = []
    for head, number, tail in triples.tolist():
        row, time = divmod(number, len(times) or 1)
        name, lhs, rhs = relations[row if original_ids is None else original_ids["relation"][row]]
        if original_ids is not None:
            head, tail = original_ids[lhs][head], original_ids[rhs][tail]
        rows.append((names[lhs][head], name, names[rhs][tail], *times[time : time + 1]))
    return rows


def named_triples(dataset: Path, split: str) -> list[tuple[str, ...]]:
    return named(dataset, np.load(dataset / f"{split}.npy"))


def owned_triples(dataset: Path) -> list[Counter]:
    """Return, for each partition, the named triples of its ``edges.npy``, going through the id maps."""
    files = (dataset / "partitions").glob("original_ids_*.npy")
    original_ids = {path.stem.removeprefix("original_ids_"): np.load(path) for path in files}
    parts = sorted((dataset / "partitions").glob("part*/edges.npy"))
    return [Counter(named(dataset, np.load(part), original_ids)) for part in parts]
