"""Splits of triples: made by a hash of each triple, and what train gives away of valid and test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from dglkge.data.dataset_files import SPLITS, TEST, TRAIN, VALID
from dglkge.data.quality import BUCKET_BYTES, Leaks, NumberedTriples, Quality, measure_quality
from dglkge.errors import InputError
from dglkge.kernels.hashing import GOLDEN_GAMMA, split_mix
from dglkge.partition.entity_types import TypedIds
from dglkge.partition.ingest import IdTriples, Place
from dglkge.partition.options import IMPLIED
from dglkge.partition.rows import CollectedRows, pieces


def split_by_hash(
    triples: IdTriples, fractions: tuple[float, float, float], seed: int, folder: Path | None = None
) -> IdTriples:
    """Distribute triples of the one split ``"train"`` over train, valid and test.

    Temporary files are in the folder; without one the triples are in memory.

    Raises
    ------
    InputError
        If no triple falls into train.
    """
    all_rows = triples.splits[TRAIN]
    bounds = np.cumsum(fractions)[:2]
    kept = {split: CollectedRows(folder, (3,), np.int32) for split in SPLITS}
    kept_weights = {split: CollectedRows(folder, (), np.float32) for split in SPLITS if triples.weights}
    for piece, (some,) in pieces(all_rows):
        # The upper 53 bits, which float64 represents exactly: a uniform number in [0, 1).
        position = (hash_triples(some, seed) >> np.uint64(11)).astype(np.float64) / 2.0**53
        # By hash and not by drawing: the split does not depend on the order of the triples, and duplicates
        # stay together.
        split_of = np.searchsorted(bounds, position, side="right")
        for place, split in enumerate(SPLITS):
            kept[split].append(some[split_of == place])
            if kept_weights:
                kept_weights[split].append(triples.weights[TRAIN][piece][split_of == place])
    splits = {split: rows.array() for split, rows in kept.items()}
    weights = {split: rows.array() for split, rows in kept_weights.items()}
    if len(splits[TRAIN]) == 0:
        raise InputError(f"--split {fractions}: no triple is left to train on out of {len(all_rows)}")
    return replace(triples, splits=splits, weights=weights)


def hash_triples(triples: np.ndarray, seed: int) -> np.ndarray:
    """Return a hash of each triple, (n,) uint64: SplitMix64 (Steele et al. 2014) over seed and ids."""
    state = np.full(len(triples), seed, dtype=np.uint64)
    for column in range(3):
        state = split_mix((state ^ triples[:, column].astype(np.uint64)) + GOLDEN_GAMMA)
    return state


def measure_triples(
    triples: IdTriples, ids: TypedIds, bucket_bytes: int = BUCKET_BYTES, num_workers: int = 1
) -> Quality:
    """Measure the quality of triples that are not written yet, with so much memory and so many threads."""
    splits = {}
    for split in SPLITS:
        rows = triples.splits.get(split, np.zeros((0, 3), dtype=np.int32))
        # With one type the ids stay: relation_ids would copy what may be larger than memory.
        relations = rows[:, 1] if len(ids.types) == 1 else ids.relation_ids(rows)
        splits[split] = (rows[:, 0], relations, rows[:, 2])
    names = triples.entities.__getitem__, ids.relations.labels.__getitem__
    numbered = NumberedTriples(splits, len(triples.entities), len(ids.relations), *names)
    return measure_quality(numbered, bucket_bytes, num_workers)


def drop_leaks(
    triples: IdTriples, leaks: Mapping[str, Leaks], which: str
) -> tuple[IdTriples, dict[str, int]]:
    """Drop the triples of valid and test that train gives away; returns how many of each, too.

    ``which`` is ``"exact"`` for triples that stand in train, ``"implied"`` also for those that train implies.
    """
    splits, weights, dropped = dict(triples.splits), dict(triples.weights), {}
    for split, marks in leaks.items():
        keep = ~(marks["in_train"] | marks["implied"]) if which == IMPLIED else ~marks["in_train"]
        dropped[split] = len(keep) - int(keep.sum())
        for arrays in (splits, weights):
            if split in arrays:
                arrays[split] = arrays[split][keep]
    return replace(triples, splits=splits, weights=weights), dropped


def check_leaks(triples: IdTriples, quality: Quality, max_implied: float, place: Place | None) -> None:
    """Check that train gives away no triple of valid and test, and implies at most a share of a split.

    ``place`` returns where a row of a split stands in the input; None if that is not known.

    Raises
    ------
    InputError
        If there are leaks: their numbers and an example.
    """
    figures = quality.report["leaks"]
    for leak, allowed in (("in_train", 0.0), ("implied", max_implied)):
        leaking = [split for split in (VALID, TEST) if figures[split][leak]["share"] > allowed]
        if not leaking:
            continue
        counts = " and ".join(
            f"{figures[split][leak]['triples']:,} of {quality.report['triples'][split]:,} {split} triples "
            f"({figures[split][leak]['share']:.1%})"
            for split in leaking
        )
        first = int(np.flatnonzero(quality.leaks[leaking[0]][leak])[0])
        example = _show(triples, leaking[0], first, place)
        if leak == "implied":
            raise InputError(
                f"{counts} follow from train by an inverse, symmetric or duplicate relation, e.g. {example}: "
                f"--strict-splits allows a share of {max_implied:g}; --drop-leaks implied leaves them out"
            )
        again = (triples.splits[TRAIN] == triples.splits[leaking[0]][first]).all(axis=1)
        also = f", also {place(TRAIN, int(np.flatnonzero(again)[0]))}" if place else ""
        raise InputError(
            f"{counts} stand in train too, e.g. {example}{also}: "
            "--strict-splits refuses this; --drop-leaks exact leaves them out"
        )


def _show(triples: IdTriples, split: str, row: int, place: Place | None) -> str:
    head, relation, tail = triples.splits[split][row].tolist()
    relation, time = divmod(relation, triples.num_times)
    names = [triples.entities[head], triples.relations[relation], triples.entities[tail]]
    names += [triples.times[time]] if triples.times else []
    return f"{place(split, row) if place else split}: {' '.join(map(repr, names))}"
