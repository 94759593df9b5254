"""Triples of ids: entities are numbered in each type, or over all; the ids are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dglkge.data.dataset_files import TRAIN
from dglkge.data.text_format import Columns
from dglkge.errors import InputError
from dglkge.partition.entity_types import type_names
from dglkge.partition.ingest import IdTriples, Reading
from dglkge.partition.name_index import MAX_NAMES


@dataclass
class Numbered:
    """Triples of ids (n, 3), entities counted over all types, with names by id (None: the ids themselves).

    ``types`` has the entity types, and the index of each entity's.
    """

    triples: np.ndarray
    entities: Sequence[str] | None = None
    relations: Sequence[str] | None = None
    types: tuple[list[str], np.ndarray] | None = None


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


def joined(numbered: Mapping[str, Numbered]) -> Reading:
    """Return the triples of all splits; an id out of range, or splits of other entities are an InputError."""
    first = numbered[TRAIN]
    for split, source in numbered.items():
        if (source.entities, source.relations) != (first.entities, first.relations):
            raise InputError(
                f"the ids of {split} are not those of train: its entities or relations have other names"
            )
    columns = ((0, 2, "entity", first.entities), (1, 1, "relation", first.relations))
    names = []
    num_fields = 2 * sum(len(source.triples) for source in numbered.values())
    for place, last, noun, known in columns:
        values = {split: source.triples[:, place : last + 1 : 2] for split, source in numbered.items()}
        largest = max((int(ids.max()) for ids in values.values() if ids.size), default=-1)
        end = MAX_NAMES if known is None else len(known)
        for split, ids in values.items():
            bad = np.flatnonzero(((ids < 0) | (ids >= end)).any(axis=1))
            if len(bad):
                row = int(bad[0])
                raise InputError(
                    f"{split}: row {row + 1}: the {noun} ids are {ids[row].tolist()}, "
                    f"allowed is 0 to {end - 1}"
                )
        if known is None and largest >= max(4 * num_fields, 1000):
            raise InputError(
                f"the {noun} ids reach {largest:,}, and there are {num_fields // 2:,} triples: each id up to "
                "the largest gets a row; number them from 0, or give names (a data frame)"
            )
        names.append(numbers(largest + 1) if known is None else known)
    splits = {split: source.triples.astype(np.int32) for split, source in numbered.items()}
    if not len(splits[TRAIN]):
        raise InputError("train has no triples")
    are_ids = first.entities is None
    return Reading(
        IdTriples(names[0], names[1], splits),
        types=first.types,
        columns=Columns() if are_ids else None,
        place=lambda split, row: f"{split}: row {row + 1}",
        integer_ids=are_ids,
    )
