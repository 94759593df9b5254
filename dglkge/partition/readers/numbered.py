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
from dglkge.partition.ingest import IdTriples, Reading, check_names
from dglkge.partition.name_index import MAX_NAMES


@dataclass
class Numbered:
    """Triples of ids.

    Attributes
    ----------
    triples : (n, 3) int64
        With entities counted over all types.
    entities, relations : sequence of str, optional
        Names by id; None: the ids themselves.
    types : (list of str, (num_entities,) int32), optional
        Entity types, and the index of each entity's.
    """

    triples: np.ndarray
    entities: Sequence[str] | None = None
    relations: Sequence[str] | None = None
    types: tuple[list[str], np.ndarray] | None = None


class TypeRanges:
    """Entities of several types as one range of numbers: type after type, in the order of their names.

    Parameters
    ----------
    counts : mapping of str to int
        Number of entities of each type.

    Attributes
    ----------
    starts : dict of str to int
        Number of the first entity of each type.
    type_of : (n,) int32
        Index of the type of each entity.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        order = sorted(counts)
        lengths = [counts[name] for name in order]
        self.starts: dict[str, int] = dict(zip(order, np.cumsum([0, *lengths]).tolist()))
        self.type_of = np.repeat(np.arange(len(order), dtype=np.int32), lengths)


def as_array(values: Any) -> np.ndarray:
    """Return an array of numpy or torch, on any device, as numpy's."""
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def numbers(count: int) -> list[str]:
    """Return the numbers from 0 on as names."""
    return [str(number) for number in range(count)]


def numbered_edges(edges: Mapping[Any, np.ndarray], counts: Mapping[str, int]) -> Numbered:
    """Return the edges (2, n) of each edge type (type, relation, type); numbers are names."""
    ranges = TypeRanges(counts)
    relations = sorted({edge_type[1] for edge_type in edges})
    blocks = [np.zeros((0, 3), np.int64)]
    for (head_type, relation, tail_type), (heads, tails) in edges.items():
        number = np.full(len(heads), relations.index(relation))
        blocks.append(
            np.stack([heads + ranges.starts[head_type], number, tails + ranges.starts[tail_type]], axis=1)
        )
    names = [name for node_type in ranges.starts for name in numbers(counts[node_type])]
    types = (type_names(list(ranges.starts)), ranges.type_of)
    return Numbered(np.concatenate(blocks), names, [str(name) for name in relations], types)


def joined(numbered: Mapping[str, Numbered]) -> Reading:
    """Return the triples of all splits.

    Raises
    ------
    InputError
        If an id is out of range, or the splits number different entities.
    """
    first = numbered[TRAIN]
    for split, each in numbered.items():
        if (each.entities, each.relations) != (first.entities, first.relations):
            raise InputError(
                f"the ids of {split} are not those of train: its entities or relations have other names"
            )
    columns = ((0, 2, "entity", first.entities), (1, 1, "relation", first.relations))
    names = []
    num_fields = 2 * sum(len(each.triples) for each in numbered.values())
    for place, last, noun, known in columns:
        values = {split: each.triples[:, place : last + 1 : 2] for split, each in numbered.items()}
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
    check_names(*names)
    splits = {split: each.triples.astype(np.int32) for split, each in numbered.items()}
    if not len(splits[TRAIN]):
        raise InputError("train has no triples")
    triples = IdTriples(names[0], names[1], splits)
    reading = Reading(triples, types=first.types, place=lambda split, row: f"{split}: row {row + 1}")
    reading.integer_ids = first.entities is None
    reading.columns = Columns() if first.entities is None else None
    return reading
