"""Gives entities their ids within their types, and makes one relation of each name and pair of types."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dglkge.data.relation_vocabulary import RelationVocabulary
from dglkge.typing import Relation


@dataclass
class TypedIds:
    """How ids without types become original ids.

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
        return np.searchsorted(self.relation_keys, _keys(triples, self.type_of, len(self.types)))

    def original_ids(self, triples: np.ndarray) -> np.ndarray:
        """Return head, relation and tail as original ids, (n, 3) int64."""
        ids = np.empty((len(triples), 3), dtype=np.int64)
        ids[:, 0] = self.id_in_type[triples[:, 0]]
        ids[:, 1] = self.relation_ids(triples)
        ids[:, 2] = self.id_in_type[triples[:, 2]]
        return ids

    def pair_ranks(self) -> np.ndarray:
        """Return the rank of each relation's pair of types, by its first relation; (num_relations,) int64."""
        rank: dict[tuple[str, str], int] = {}
        pairs = [(relation.lhs, relation.rhs) for relation in self.relations.relations]
        return np.array([rank.setdefault(pair, len(rank)) for pair in pairs], dtype=np.int64)


def assign_ids(
    splits: dict[str, np.ndarray], relation_names: list[str], types: list[str], type_of: np.ndarray
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
    found = [np.unique(_keys(triples, type_of, len(types))) for triples in splits.values()]
    keys = np.unique(np.concatenate(found))
    unused = np.setdiff1d(np.arange(len(relation_names)), keys // len(types) ** 2)
    keys = np.union1d(keys, unused * len(types) ** 2)
    relations = []
    for key in keys.tolist():
        rest, rhs = divmod(key, len(types))
        name, lhs = divmod(rest, len(types))
        relations.append(Relation(relation_names[name], types[lhs], types[rhs]))
    return TypedIds(types, type_of, id_in_type, RelationVocabulary(relations), keys)


def _keys(triples: np.ndarray, type_of: np.ndarray, num_types: int) -> np.ndarray:
    keys = triples[:, 1].astype(np.int64)
    keys = keys * num_types + type_of[triples[:, 0]]
    return keys * num_types + type_of[triples[:, 2]]
