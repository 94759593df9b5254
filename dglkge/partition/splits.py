"""Splits by a hash of each triple."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from dglkge.data.dataset_files import SPLITS, TRAIN
from dglkge.errors import InputError
from dglkge.kernels.hashing import GOLDEN_GAMMA, split_mix
from dglkge.partition.ingest import IdTriples
from dglkge.partition.rows import CollectedRows, pieces


def parse_fractions(text: str) -> tuple[float, float, float]:
    """Parse the ``--split`` option: three fractions, or the one of train (the rest is halved).

    Raises
    ------
    InputError
        If they are no fractions, that of train is 0, or they do not add up to 1.
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        rest = (1 - numbers[0]) / 2
        numbers = [numbers[0], rest, rest]
    if len(numbers) != 3 or not all(0 <= x <= 1 for x in numbers) or numbers[0] == 0:
        raise InputError(f"--split {text!r} is not allowed; give one or three fractions, e.g. 0.9,0.05,0.05")
    # Decimal fractions such as 0.9 + 0.05 + 0.05 are not exact in binary.
    if not math.isclose(sum(numbers), 1, abs_tol=1e-6):
        raise InputError(f"--split {text!r}: the fractions add up to {sum(numbers):g}, not 1")
    return numbers[0], numbers[1], numbers[2]


def split_by_hash(
    triples: IdTriples, fractions: tuple[float, float, float], seed: int, folder: Path | None = None
) -> IdTriples:
    """Distribute the triples of the train split over three splits.

    Parameters
    ----------
    triples : IdTriples
        With the one split ``"train"``.
    fractions : (float, float, float)
        Of train, valid and test.
    seed : int
        Another seed gives another split.
    folder : Path, optional
        Folder for temporary files; by default the triples are in memory.

    Raises
    ------
    InputError
        If no triple falls into train.
    """
    rows = triples.splits[TRAIN]
    bounds = np.cumsum(fractions)[:2]
    kept = {split: CollectedRows(folder, (3,), np.int32) for split in SPLITS}
    kept_weights = {split: CollectedRows(folder, (), np.float32) for split in SPLITS if triples.weights}
    for piece, (some,) in pieces(rows):
        # The upper 53 bits, which float64 represents exactly: a uniform number in [0, 1).
        position = (hash_triples(some, seed) >> np.uint64(11)).astype(np.float64) / 2.0**53
        # By hash and not by drawing: the split does not depend on the order of the triples, and duplicates
        # stay together.
        split_of = np.searchsorted(bounds, position, side="right")
        for place, split in enumerate(SPLITS):
            kept[split].append(some[split_of == place])
            if kept_weights:
                kept_weights[split].append(triples.weights[TRAIN][piece][split_of == place])
    splits = {split: found.array() for split, found in kept.items()}
    weights = {split: found.array() for split, found in kept_weights.items()}
    if len(splits[TRAIN]) == 0:
        raise InputError(f"--split {fractions}: no triple is left to train on out of {len(rows)}")
    return IdTriples(triples.entities, triples.relations, splits, weights)


def hash_triples(triples: np.ndarray, seed: int) -> np.ndarray:
    """Return a hash of each triple, (n,) uint64: SplitMix64 (Steele et al. 2014) over seed and ids."""
    state = np.full(len(triples), seed, dtype=np.uint64)
    for column in range(3):
        state = split_mix((state ^ triples[:, column].astype(np.uint64)) + GOLDEN_GAMMA)
    return state
