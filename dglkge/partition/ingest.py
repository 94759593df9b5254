"""Converts chunks of triples to arrays of ids: ids follow the order of the names within each type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dglkge.data.name_list import NameList
from dglkge.data.text_format import ROLES, WEIGHT, Columns
from dglkge.data.vocabulary import RelationVocabulary
from dglkge.errors import InputError
from dglkge.kernels.triple_rows import renumber
from dglkge.partition.column_order import column_order_advice
from dglkge.partition.name_index import NameIndex
from dglkge.partition.read_files import SplitFiles
from dglkge.partition.rows import CollectedRows, map_in_order, pieces
from dglkge.typing import Relation


@dataclass
class IdTriples:
    """Triples as ids, before entities have types.

    Attributes
    ----------
    entities, relations : sequence of str
        The names of id 0, 1, 2, ...
    splits : dict of str to (n, 3) int32
        Head, relation and tail of each split.
    weights : dict of str to (n,) float32
        The weights of each split; empty where there are none.
    """

    entities: Sequence[str]
    relations: Sequence[str]
    splits: dict[str, np.ndarray]
    weights: dict[str, np.ndarray] = field(default_factory=dict)


_DENSE_KEYS = 1 << 26

Chunks = Mapping[str, Iterable[pd.DataFrame]]
"""Data frames with categorical columns, or columns of integers, for each split."""


def ingest_names(source: Chunks | SplitFiles, folder: Path | None = None) -> IdTriples:
    """Read all splits of triples of names.

    Parameters
    ----------
    source : mapping of str to iterable of DataFrame, or SplitFiles
        For each split its chunks, as ``dglkge.data.triples`` yields them, or files.
    folder : Path, optional
        Folder for temporary files of the ids, 12 bytes a triple; by default they are in memory.

    Raises
    ------
    InputError
        If a name holds a character that the dataset's files cannot hold.
    """
    entities, relations = NameIndex(), NameIndex()
    index = {"head": entities, "relation": relations, "tail": entities}
    # First ids by appearance in one pass, then renumbering in place: the names are sorted once, not the
    # triples.
    splits, weights = _collect(source, lambda role, column: index[role].add(column), folder)
    entity_names, entity_places = entities.in_order()
    relation_names, relation_places = relations.in_order()
    check_names(entity_names, "entity", "\n")
    check_names(relation_names, "relation", "\n\t")
    num_workers = source.num_workers if isinstance(source, SplitFiles) else 1

    def renumbered(piece: np.ndarray) -> None:
        renumber(np.asarray(piece), entity_places, relation_places)

    for triples in splits.values():
        for _ in map_in_order(renumbered, (piece for _, (piece,) in pieces(triples)), num_workers):
            pass
    return IdTriples(entity_names, relation_names, splits, weights)


def ingest_ids(
    source: Chunks | SplitFiles,
    entity_names: list[str] | None,
    relation_names: list[str] | None,
    columns: Columns | None = None,
    folder: Path | None = None,
) -> IdTriples:
    """Read all splits of triples of integer ids.

    Parameters
    ----------
    source : mapping of str to iterable of DataFrame, or SplitFiles
        For each split its chunks of integers, or files.
    entity_names, relation_names : list of str, optional
        The id maps. Without one, the names are the integers, and every integer up to the largest must occur.
    columns : Columns, optional
        The order in which the columns were read, for the error message.
    folder : Path, optional
        As for :func:`ingest_names`.

    Raises
    ------
    InputError
        If integers are missing among those that occur, and no id map allows it.
    """
    splits, weights = _collect(source, lambda role, column: column.to_numpy(), folder)
    try:
        if entity_names is None:
            entity_names = _dense_names(splits, (0, 2), "entity")
        if relation_names is None:
            relation_names = _dense_names(splits, (1,), "relation")
    except InputError as error:
        # Integers in a wrong order often leave gaps; then the maps that the message asks for would not help.
        advice = column_order_advice(splits, columns or Columns())
        if advice is None:
            raise
        raise InputError(f"{error}; {advice}") from error
    return IdTriples(entity_names, relation_names, splits, weights)


def _collect(
    source: Chunks | SplitFiles,
    ids_of: Callable[[str, Any], np.ndarray],
    folder: Path | None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the ids and the weights of each split; ``ids_of`` turns a role's column into ids."""
    if isinstance(source, SplitFiles):
        return source.collect(ids_of, folder)
    splits, weights = {}, {}
    for split, chunks in source.items():
        parts, weight_parts = CollectedRows(folder, (3,), np.int32), CollectedRows(folder, (), np.float32)
        has_weights = False
        for chunk in chunks:
            triples = np.empty((len(chunk), 3), dtype=np.int32)
            for column, role in enumerate(ROLES):
                triples[:, column] = ids_of(role, chunk[role])
            parts.append(triples)
            if WEIGHT in chunk:
                has_weights = True
                weight_parts.append(chunk[WEIGHT].to_numpy(dtype=np.float32))
        splits[split] = parts.array()
        if has_weights:
            weights[split] = weight_parts.array()
    return splits, weights


def check_names(names: Sequence[str], noun: str, forbidden: str) -> None:
    """Raise InputError if a name holds one of the forbidden characters."""
    for character in forbidden:
        if isinstance(names, NameList) and not names.has_byte(ord(character)):
            continue
        for name in names:
            if character in name:
                raise InputError(
                    f"the {noun} name {name!r} holds {character!r}, which no dataset file can hold"
                )


def _dense_names(splits: Mapping[str, np.ndarray], columns: tuple[int, ...], noun: str) -> list[str]:
    largest, num_fields = -1, 0
    for rows in splits.values():
        num_fields += len(rows) * len(columns)
        for _, (piece,) in pieces(rows):
            largest = max(largest, *(int(piece[:, column].max()) for column in columns))
    num_ids = 1 + largest
    advice = f"give --{noun}-map if there are more than occur, or --ids names if these are names"
    # Refused before the array below is allocated: one large id must not need gigabytes.
    if num_ids > num_fields:
        raise InputError(
            f"the {noun} ids reach {num_ids - 1}, more than there are fields to hold them: {advice}"
        )
    occurs = np.zeros(num_ids, dtype=bool)
    for rows in splits.values():
        for _, (piece,) in pieces(rows):
            for column in columns:
                occurs[piece[:, column]] = True
    missing = np.flatnonzero(~occurs)
    if len(missing):
        raise InputError(
            f"{len(missing)} of the {noun} ids 0 to {num_ids - 1} never occur, "
            f"the first is {missing[0]}: {advice}"
        )
    return [str(id_) for id_ in range(num_ids)]


@dataclass
class TypedIds:
    """Map from ids without types to original ids.

    Attributes
    ----------
    types : list of str
        The entity types.
    type_of : (num_entities,) int32
        Index of the type of each entity.
    id_in_type : (num_entities,) int32
        Original id of each entity, counted within its type.
    relations : RelationVocabulary
        The relations, sorted by name, lhs and rhs (with integer ids: by integer, lhs and rhs).
    relation_keys : (num_relations,) int64
        Name and types of each relation as one ascending number.
    """

    types: list[str]
    type_of: np.ndarray
    id_in_type: np.ndarray
    relations: RelationVocabulary
    relation_keys: np.ndarray

    def num_entities(self) -> dict[str, int]:
        """Return the number of entities of each type."""
        counts = np.bincount(self.type_of, minlength=len(self.types))
        return {type_: int(count) for type_, count in zip(self.types, counts)}

    def entities_of(self, type_index: int) -> np.ndarray:
        """Return the entities of a type by original id."""
        return np.flatnonzero(self.type_of == type_index)

    def relation_ids(self, triples: np.ndarray) -> np.ndarray:
        """Return the original relation id of each triple, (n,) int64."""
        if len(self.types) == 1:
            # Each relation id has its one key, those that no triple has too: ids are places.
            found: np.ndarray = triples[:, 1].astype(np.int64)
            return found
        return np.searchsorted(self.relation_keys, _keys(triples, self.type_of, len(self.types)))

    def original_ids(self, triples: np.ndarray) -> np.ndarray:
        """Return head, relation and tail as original ids, (n, 3) int64."""
        if len(self.types) == 1:
            # Ids within the one type are the ids.
            return triples.astype(np.int64)
        ids = np.empty((len(triples), 3), dtype=np.int64)
        ids[:, 0] = self.id_in_type[triples[:, 0]]
        ids[:, 1] = self.relation_ids(triples)
        ids[:, 2] = self.id_in_type[triples[:, 2]]
        return ids

    def pair_ranks(self) -> np.ndarray:
        """Return the rank of each relation's pair of types, by its first relation; (num_relations,) int64."""
        # Ranks follow the sorted relations, so the order of edge types does not depend on the order of the
        # triples.
        rank: dict[tuple[str, str], int] = {}
        pairs = [(relation.lhs, relation.rhs) for relation in self.relations.relations]
        return np.array([rank.setdefault(pair, len(rank)) for pair in pairs], dtype=np.int64)


def assign_ids(
    splits: dict[str, np.ndarray], relation_names: Sequence[str], types: list[str], type_of: np.ndarray
) -> TypedIds:
    """Plan the original ids.

    Parameters
    ----------
    splits : dict of str to (n, 3) int32
        The triples, in ids without types.
    relation_names : list of str
        Name of each relation id without types.
    types : list of str
        The entity types.
    type_of : (num_entities,) int32
        Index of each entity's type.

    Notes
    -----
    A relation id that no triple has (an id map may list some) becomes a relation between the first types, so
    that it keeps its place.
    """
    id_in_type = np.empty(len(type_of), dtype=np.int32)
    for index in range(len(types)):
        members = np.flatnonzero(type_of == index)
        id_in_type[members] = np.arange(len(members), dtype=np.int32)
    keys = _distinct_keys(splits, type_of, len(types), len(relation_names))
    # A key is (name * types + lhs) * types + rhs; dividing by types squared gives the name back.
    unused = np.setdiff1d(np.arange(len(relation_names)), keys // len(types) ** 2)
    keys = np.union1d(keys, unused * len(types) ** 2)
    relations = []
    for key in keys.tolist():
        rest, rhs = divmod(key, len(types))
        name, lhs = divmod(rest, len(types))
        relations.append(Relation(relation_names[name], types[lhs], types[rhs]))
    return TypedIds(types, type_of, id_in_type, RelationVocabulary(relations), keys)


def _distinct_keys(
    splits: dict[str, np.ndarray], type_of: np.ndarray, num_types: int, num_names: int
) -> np.ndarray:
    """Return the keys that occur, ascending."""
    num_keys = num_names * num_types**2
    occurs = np.zeros(num_keys if num_keys <= _DENSE_KEYS else 0, bool)
    keys = np.empty(0, np.int64)
    for triples in splits.values():
        for _, (piece,) in pieces(triples):
            found = _keys(piece, type_of, num_types)
            if num_keys <= _DENSE_KEYS:
                occurs[found] = True
            else:
                keys = np.union1d(keys, found)
    return np.flatnonzero(occurs) if num_keys <= _DENSE_KEYS else keys


def _keys(triples: np.ndarray, type_of: np.ndarray, num_types: int) -> np.ndarray:
    keys = triples[:, 1].astype(np.int64)
    if num_types == 1:
        return keys
    keys = keys * num_types + type_of[triples[:, 0]]
    return keys * num_types + type_of[triples[:, 2]]
