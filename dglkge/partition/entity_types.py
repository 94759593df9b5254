"""Types of entities, from a file or from triples such as ``x rdf:type C``, and the original ids by type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dglkge.data.dataset_files import TRAIN
from dglkge.data.vocabulary import RelationVocabulary
from dglkge.errors import InputError, unknown_name
from dglkge.partition.ingest import IdTriples, Reading, Types
from dglkge.partition.name_index import NameList, name_list
from dglkge.partition.options import Options, ReadingOptions
from dglkge.partition.readers.graphml import TYPE_RELATION
from dglkge.partition.readers.id_folders import read_pairs
from dglkge.partition.readers.rdf import WELL_KNOWN, PrefixTable
from dglkge.partition.rows import distinct_numbers, pieces
from dglkge.typing import RELATION, Relation

DEFAULT_TYPE = "entity"
_TYPE_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9_.-]{1,100}")


def types_of_entities(options: Options, entities: Sequence[str]) -> Types:
    """Return the types that entities have, sorted, and the index (n,) int32 of each entity's.

    The file has lines of entity and type (more columns are not read), with integer ids of the entities'
    numbers instead of their names. Without one there is one type, ``entity``.

    Raises
    ------
    InputError
        If an entity has no type or two, or a type's name cannot be used.
    """
    path = options.entity_types
    if path is None:
        return [DEFAULT_TYPE], np.zeros(len(entities), dtype=np.int32)
    type_by_entity: dict[str, str] = {}
    for line, entity, type_ in read_pairs(path, ("entity", "type"), more_columns=True):
        fault = type_name_fault(type_)
        if (before := type_by_entity.setdefault(entity, type_)) != type_:
            fault = f"entity {entity!r} has type {type_!r}, a line before says {before!r}"
        if fault:
            raise InputError(f"{path}:{line}: {fault}")
    # With integer ids the file has the integers, although an id map may give other names.
    keys = [str(id_) for id_ in range(len(entities))] if options.integer_ids else list(entities)
    untyped = [key for key in keys if key not in type_by_entity]
    if untyped:
        fault = f"{len(untyped)} entities of the triples have no type, the first is {untyped[0]!r}"
        raise InputError(f"{path}: {fault}")
    type_of, types = pd.factorize(np.array([type_by_entity[key] for key in keys], object), sort=True)
    return types.tolist(), type_of.astype(np.int32)


def type_name_fault(name: str) -> str | None:
    """Return the reason why a name is not allowed for an entity type, or None."""
    # Types become names of files, of DGL's node types and of its edge types.
    if name == RELATION:
        return f"the type {name!r} is not allowed: it is the name of the relations' table"
    fault = f"the type {name!r} is not allowed: up to 100 letters, digits, '.', '-' and single '_' are"
    return None if _TYPE_NAME.fullmatch(name) and "__" not in name else fault


UNTYPED = "untyped"
"""Type of the entities without a class that became one."""

_TOO_GENERAL = [*map(PrefixTable(WELL_KNOWN).expand, ("owl:Thing", "owl:NamedIndividual", "rdfs:Resource"))]


def main_types(pairs: np.ndarray, usable: np.ndarray, max_types: int, min_size: int) -> np.ndarray:
    """Choose one class for each entity, (num_entities,) int64 or -1: that of its classes with most members.

    Few large types are what a data set needs: a partition owns an entity of every type, and pairs of types
    become edge types.

    Parameters
    ----------
    pairs : (n, 2) int
        Entity and class, as entity ids.
    usable : (num_entities,) bool
        Whether an entity has a type at all: it is in a triple that stays.
    max_types : int
        Number of classes that become types. An entity of another class gets the largest of its classes
        that did, or none.
    min_size : int
        Least number of entities of a type.
    """
    num_entities = len(usable)
    pairs = np.unique(pairs[usable[pairs[:, 0]]].astype(np.int64), axis=0)
    # Members that no triple has would make a class large that then has few entities.
    members = np.bincount(pairs[:, 1], minlength=num_entities)
    _, sizes = _largest(pairs, members)
    kept = np.zeros(num_entities, dtype=bool)
    kept[np.argsort(-sizes, kind="stable")[:max_types]] = True
    while True:
        class_of, sizes = _largest(pairs[kept[pairs[:, 1]]], members)
        small = kept & (sizes > 0) & (sizes < min_size)
        if not small.any():
            return class_of
        # Its members may have another class; which in turn may become large enough.
        kept &= ~small


def _largest(pairs: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each entity its class with the most members, of equal ones the first by name; all sizes."""
    class_of = np.full(len(members), -1, dtype=np.int64)
    # Ids follow names; of several assignments to one entity the last holds.
    order = np.lexsort((-pairs[:, 1], members[pairs[:, 1]]))
    class_of[pairs[order, 0]] = pairs[order, 1]
    return class_of, np.bincount(class_of[class_of >= 0], minlength=len(members))


def type_names(classes: list[str]) -> list[str]:
    """Return a name for each class that a type may have: its last part, or more of it where two are alike.

    Examples
    --------
    >>> type_names(["foaf:Person", "schema:Person", "http://example.org/City"])
    ['foaf_Person', 'schema_Person', 'City']
    """
    last = [_allowed(re.split(r"[/#:]", name.rstrip("/#:>"))[-1]) for name in classes]
    names = [short if last.count(short) == 1 else _allowed(name) for name, short in zip(classes, last)]
    taken = {UNTYPED}
    for place, name in enumerate(names):
        number = 2
        while names[place] in taken or type_name_fault(names[place]):
            names[place], number = f"{name}-{number}", number + 1
        taken.add(names[place])
    return names


def _allowed(name: str) -> str:
    """Return a name with the characters that the name of a type may have."""
    return re.sub(r"_{2,}", "_", re.sub(r"[^A-Za-z0-9_.-]+", "_", name))[:90].strip("_") or "class"


def take_types(reading: Reading, options: Options, family: str) -> None:
    """Turn the triples of the relation ``types_from``, whose tails are classes, into entity types.

    Entities of which nothing else is known are left out. InputError if the relation is not there.
    """
    types_from, triples = options.reading.types_from, reading.triples
    if reading.types is not None and (types_from is not None or options.entity_types is not None):
        raise InputError("the input has entity types of its own: give no --types-from and no --entity-types")
    if types_from is None:
        return
    relation, general = _type_relation(reading, options.reading, family)
    pairs, splits, weights = [], {}, {}
    used = np.zeros(len(triples.entities), dtype=bool)
    for split, rows in triples.splits.items():
        is_type = rows[:, 1] == relation
        pairs.append(rows[is_type][:, [0, 2]])
        splits[split] = rows[~is_type]
        used[splits[split][:, [0, 2]]] = True
        if split in triples.weights:
            weights[split] = triples.weights[split][~is_type]
    if len(splits[TRAIN]) == 0:
        raise InputError(f"--types-from {types_from}: no triple is left to train on")
    all_pairs = np.concatenate(pairs)
    usable = all_pairs[~general[all_pairs[:, 1]]]
    class_of = main_types(usable, used, options.reading.max_types, options.num_parts)[used]
    places = (np.cumsum(used) - 1).astype(np.int32)
    for rows in splits.values():
        rows[:, 0], rows[:, 2] = places[rows[:, 0]], places[rows[:, 2]]
        rows[:, 1] -= rows[:, 1] > relation
    class_ids, number_of = np.unique(class_of, return_inverse=True)
    known = [triples.entities[id_] for id_ in class_ids.tolist() if id_ >= 0]
    classes = dict(zip(type_names(known), known))
    # No class, -1, is the first.
    names = [UNTYPED, *classes] if class_ids[0] < 0 else list(classes)
    types = sorted(names)
    reading.types = types, np.array([types.index(name) for name in names], np.int32)[number_of]
    entities = [name for name, is_used in zip(triples.entities, used.tolist()) if is_used]
    relations = [name for id_, name in enumerate(triples.relations) if id_ != relation]
    reading.triples = IdTriples(entities, relations, splits, weights)
    left_out = len(used) - len(entities)
    figures = {"from": types_from, "triples": len(all_pairs), "entities_left_out": left_out}
    reading.figures["types"] = {**figures, "classes": dict(sorted(classes.items()))}
    note = f"{len(all_pairs):,} triples of {types_from} became {len(types)} entity types"
    reading.notes.append(f"{note}; {left_out:,} entities and classes without other triples are left out")


def _type_relation(reading: Reading, options: ReadingOptions, family: str) -> tuple[int, np.ndarray]:
    """Return the id of the relation, and which entities are classes that say nothing."""
    entities, relations, name = reading.triples.entities, reading.triples.relations, options.types_from or ""
    if family == "graphml" and TYPE_RELATION not in relations:
        raise InputError(f"--types-from: no node has the attribute {name!r}")
    general = np.zeros(len(entities), dtype=bool)
    if family == "rdf":
        table = PrefixTable(reading.figures["prefixes"])
        name = table.shorten(PrefixTable(options.prefixes, table.iris, WELL_KNOWN).expand(name))
        # Classes of literals and blank nodes (restrictions of OWL) have no name to use.
        general[:] = [name[0] in '"_' or table.expand(name) in _TOO_GENERAL for name in entities]
    name = TYPE_RELATION if family == "graphml" else name
    if name not in relations:
        raise unknown_name("relation of --types-from", options.types_from or "", relations)
    return relations.index(name), general


@dataclass
class TypedIds:
    """Map from ids without types to original ids.

    Attributes
    ----------
    types : list of str
        The entity types.
    type_of, id_in_type : (num_entities,) int32
        Index of the type of each entity, and its original id, counted within its type.
    relations : RelationVocabulary
        The relations, sorted by name, lhs and rhs (with integer ids: by integer, lhs and rhs), at all times.
    relation_keys : (R,) int64
        Name and types of each relation as one ascending number.
    """

    types: list[str]
    type_of: np.ndarray
    id_in_type: np.ndarray
    relations: RelationVocabulary
    relation_keys: np.ndarray

    def num_entities(self) -> dict[str, int]:
        """Return the number of entities of each type."""
        return dict(zip(self.types, np.bincount(self.type_of, minlength=len(self.types)).tolist()))

    def vocabularies(self, names: Sequence[str]) -> Iterator[tuple[str, NameList]]:
        """Yield each type and the names of its entities by original id, out of the names of all entities."""
        for number, type_ in enumerate(self.types):
            members = np.flatnonzero(self.type_of == number)
            yield type_, name_list(names) if len(members) == len(names) else name_list(names).take(members)

    def relation_ids(self, triples: np.ndarray) -> np.ndarray:
        """Return the original relation id of each triple, (n,); with one type a view of the triples."""
        if len(self.types) == 1:
            # Each relation id has its one key, those that no triple has too: ids are places.
            return triples[:, 1]
        num_times = self.relations.num_times
        keys = _keys(triples, self.type_of, len(self.types), num_times)
        return np.searchsorted(self.relation_keys, keys) * num_times + triples[:, 1] % num_times

    def original_ids(self, triples: np.ndarray) -> np.ndarray:
        """Return head, relation and tail as original ids, (n, 3) int64."""
        if len(self.types) == 1:
            # Ids within the one type are the ids.
            return triples.astype(np.int64)
        heads, tails = self.id_in_type[triples[:, 0]], self.id_in_type[triples[:, 2]]
        return np.stack([heads, self.relation_ids(triples), tails], axis=1)


def assign_ids(triples: IdTriples, types: list[str], type_of: np.ndarray) -> TypedIds:
    """Plan the original ids of triples without types, by the index (num_entities,) int32 of each one's type.

    A relation id that no triple has (an id map may list some) becomes a relation between the first types, so
    that it keeps its place.
    """
    id_in_type = np.empty(len(type_of), dtype=np.int32)
    for index in range(len(types)):
        members = np.flatnonzero(type_of == index)
        id_in_type[members] = np.arange(len(members), dtype=np.int32)
    blocks = (block for rows in triples.splits.values() for _, (block,) in pieces(rows))
    key_blocks = (_keys(block, type_of, len(types), triples.num_times) for block in blocks)
    relation_names = triples.relations
    keys = distinct_numbers(key_blocks, len(relation_names) * len(types) ** 2)
    # A key is (name * types + lhs) * types + rhs; dividing by types squared gives the name back.
    unused = np.setdiff1d(np.arange(len(relation_names)), keys // len(types) ** 2)
    keys = np.union1d(keys, unused * len(types) ** 2)
    numbers = np.transpose(np.unravel_index(keys, (len(relation_names), len(types), len(types)))).tolist()
    relations = [Relation(relation_names[name], types[lhs], types[rhs]) for name, lhs, rhs in numbers]
    return TypedIds(types, type_of, id_in_type, RelationVocabulary(relations, triples.times), keys)


def _keys(triples: np.ndarray, type_of: np.ndarray, num_types: int, num_times: int) -> np.ndarray:
    keys = triples[:, 1].astype(np.int64) // num_times
    if num_types == 1:
        return keys
    return (keys * num_types + type_of[triples[:, 0]]) * num_types + type_of[triples[:, 2]]
