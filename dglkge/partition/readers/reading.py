"""What reading an input gives: triples of ids, entity types, a side file, figures for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dglkge.data.text_format import ROLES, Columns
from dglkge.partition.ingest import IdTriples
from dglkge.partition.leaks import Place

CHUNK_ROWS = 1 << 16
"""Triples of a chunk: bounds the strings that are in memory at a time."""

Watch = Callable[[Path], Callable[[int], None]]
"""Returns, for a file, the function to call with the number of its bytes read so far."""


@dataclass
class Reading:
    """The triples of an input, and what goes into the data set with them.

    Attributes
    ----------
    triples : IdTriples
        All splits.
    types : (list of str, (n,) int32), optional
        The entity types, and the index of each entity's type.
    columns : Columns, optional
        The columns that were read, if the input is a table.
    place : callable, optional
        Returns where a triple is in the input, given its split and row.
    write_side_files : callable
        Writes files into the data set's folder, given the names of its entities.
    figures : dict
        Counts and the prefixes, for the report.
    notes : list of str
        Lines about them for people.
    """

    triples: IdTriples
    types: tuple[list[str], np.ndarray] | None = None
    columns: Columns | None = None
    place: Place | None = None
    write_side_files: Callable[[Path, Sequence[str]], None] = lambda folder, entities: None
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def name_chunk(columns: Sequence[Sequence[str]]) -> pd.DataFrame:
    """Return heads, relations and tails as a chunk with categorical columns, as tables are read."""
    arrays = (pa.array(column, pa.string()).dictionary_encode().to_pandas() for column in columns)
    return pd.DataFrame(dict(zip(ROLES, arrays)))


def renamed(triples: IdTriples, entities: Sequence[str], relations: Sequence[str]) -> IdTriples:
    """Return the triples with other names: ids follow the order of the new ones.

    Parameters
    ----------
    triples : IdTriples
        Its arrays are changed in place.
    entities, relations : sequence of str
        The new name of each id, all different.
    """
    entity_names, entity_places = _in_order(entities)
    relation_names, relation_places = _in_order(relations)
    for rows in triples.splits.values():
        rows[:, 0] = entity_places[rows[:, 0]]
        rows[:, 1] = relation_places[rows[:, 1]]
        rows[:, 2] = entity_places[rows[:, 2]]
    return IdTriples(entity_names, relation_names, triples.splits, triples.weights)


def _in_order(names: Sequence[str]) -> tuple[list[str], np.ndarray]:
    order = sorted(range(len(names)), key=names.__getitem__)
    places = np.empty(len(names), dtype=np.int32)
    places[order] = np.arange(len(names), dtype=np.int32)
    return [names[id_] for id_ in order], places
