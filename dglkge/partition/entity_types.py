"""Types of entities, from a file or from triples such as ``x rdf:type C``, and the original ids by type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dglkge.data.dataset_files import TRAIN
from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.errors import InputError, unknown_name
from dglkge.partition.ingest import IdTriples, Reading
from dglkge.partition.name_index import NameList
from dglkge.partition.options import GRAPHML, RDF, Options, ReadingOptions
from dglkge.partition.readers.graphml import TYPE_RELATION
from dglkge.partition.readers.id_folders import read_pairs
from dglkge.partition.readers.rdf import WELL_KNOWN, PrefixTable
from dglkge.partition.rows import distinct_numbers, pieces
from dglkge.typing import RELATION, Relation

DEFAULT_TYPE = "entity"
_TYPE_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def types_of_entities(
    path: Path | None, entities: Sequence[str], integer_ids: bool
) -> tuple[list[str], np.ndarray]:
    """Return the types that entities have, sorted, and the index (n,) int32 of each entity's.

    The file has lines of entity and type (more columns are not read), with integer ids of the entities'
    numbers instead of their names. Without one there is one type, ``entity``.

    Raises
    ------
    InputError
        If an entity has no type or two, or a type's name cannot be used.
    """
    if path is None:
        return [DEFAULT_TYPE], np.zeros(len(entities), dtype=np.int32)
    type_by_entity: dict[str, str] = {}
    for line, entity, type_ in read_pairs(path, ("entity", "type"), more_columns=True):
        if type_by_entity.setdefault(entity, type_) != type_:
            raise InputError(
                f"{path}:{line}: entity {entity!r} has type {type_!r}, "
                f"a line before says {type_by_entity[entity]!r}"
            )
        if fault := type_name_fault(type_):
            raise InputError(f"{path}:{line}: {fault}")
    # With integer ids the file has the integers, although an id map may give other names.
    keys = [str(id_) for id_ in range(len(entities))] if integer_ids else list(entities)
    untyped = [key for key in keys if key not in type_by_entity]
    if untyped:
        raise InputError(
            f"{path}: {len(untyped)} entities of the triples have no type, the first is {untyped[0]!r}"
        )
    types = sorted({type_by_entity[key] for key in keys})
    index = {type_: place for place, type_ in enumerate(types)}
    return types, np.array([index[type_by_entity[key]] for key in keys], dtype=np.int32)


def type_name_fault(name: str) -> str | None:
    """Return the reason why a name is not allowed for an entity type, or None."""
    # Types become names of files, of DGL's node types and of its edge types.
    if not _TYPE_NAME.fullmatch(name) or "__" in name:
        return f"the type {name!r} is not allowed: only letters, digits, '.', '-' and single '_' are"
    if name == RELATION:
        return f"the type {name!r} is not allowed: it is the name of the relations' table"
    return None


UNTYPED = "untyped"
"""Type of the entities without a class that became one."""

_TOO_GENERAL = (
    WELL_KNOWN["owl"] + "Thing",
    WELL_KNOWN["owl"] + "NamedIndividual",
    WELL_KNOWN["rdfs"] + "Resource",
)


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
    class_of = _largest(pairs, members)
    kept = np.zeros(num_entities, dtype=bool)
    sizes = np.bincount(class_of[class_of >= 0], minlength=num_entities)
    kept[np.argsort(-sizes, kind="stable")[:max_types]] = True
    while True:
        class_of = _largest(pairs[kept[pairs[:, 1]]], members)
        sizes = np.bincount(class_of[class_of >= 0], minlength=num_entities)
        small = kept & (sizes > 0) & (sizes < min_size)
        if not small.any():
            return class_of
        # Its members may have another class; which in turn may become large enough.
        kept &= ~small


def _largest(pairs: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Return for each entity the class with the most members, of equal ones the first by name."""
    class_of = np.full(len(members), -1, dtype=np.int64)
    # Ids follow names; of several assignments to one entity the last holds.
    order = np.lexsort((-pairs[:, 1], members[pairs[:, 1]]))
    class_of[pairs[order, 0]] = pairs[order, 1]
    return class_of


def types_from_triples(
    triples: IdTriples, relation: int, general: np.ndarray, max_types: int, min_size: int
) -> tuple[IdTriples, tuple[list[str], np.ndarray], dict[str, str]]:
    """Take the triples of a relation, whose tails are classes, out as entity types.

    General classes, (num_entities,) bool, are not used; the limits are those of :func:`main_types`.

    Returns
    -------
    triples : IdTriples
        Without the relation, and without entities of which nothing else is known.
    types : (list of str, (n,) int32)
        The types, and the index of each entity's type.
    classes : dict of str to str
        The class of each type but ``untyped``.
    """
    num_entities = len(triples.entities)
    pairs, splits, weights = [], {}, {}
    used = np.zeros(num_entities, dtype=bool)
    for split, rows in triples.splits.items():
        is_type = rows[:, 1] == relation
        pairs.append(rows[is_type][:, [0, 2]])
        splits[split] = rows[~is_type]
        used[splits[split][:, 0]] = used[splits[split][:, 2]] = True
        if split in triples.weights:
            weights[split] = triples.weights[split][~is_type]
    all_pairs = np.concatenate(pairs)
    all_pairs = all_pairs[~general[all_pairs[:, 1]]]
    class_of = main_types(all_pairs, used, max_types, min_size)[used]
    places = (np.cumsum(used) - 1).astype(np.int32)
    for rows in splits.values():
        rows[:, 0], rows[:, 2] = places[rows[:, 0]], places[rows[:, 2]]
        rows[:, 1] -= rows[:, 1] > relation
    classes = np.unique(class_of[class_of >= 0]).tolist()
    names = type_names([triples.entities[class_] for class_ in classes])
    # The last place of the lookup is that of no class: -1 is its index.
    untyped = [(-1, UNTYPED)] if (class_of < 0).any() else []
    present = sorted([*names, *(name for _, name in untyped)])
    lookup = np.zeros(num_entities + 1, dtype=np.int32)
    for class_, name in [*zip(classes, names), *untyped]:
        lookup[class_] = present.index(name)
    entities = [name for name, is_used in zip(triples.entities, used.tolist()) if is_used]
    relations = [name for id_, name in enumerate(triples.relations) if id_ != relation]
    kept = IdTriples(entities, relations, splits, weights)
    classes_of = {name: triples.entities[class_] for class_, name in zip(classes, names)}
    return kept, (present, lookup[class_of]), dict(sorted(classes_of.items()))


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
    return re.sub(r"_{2,}", "_", re.sub(r"[^A-Za-z0-9_.-]+", "_", name)).strip("_") or "class"


def take_types(reading: Reading, options: Options, family: str) -> None:
    """Turn the triples of the relation ``types_from`` into entity types; InputError if it is not there."""
    types_from = options.reading.types_from
    if reading.types is not None and (types_from is not None or options.entity_types is not None):
        raise InputError("the input has entity types of its own: give no --types-from and no --entity-types")
    if types_from is None:
        return
    triples = reading.triples
    relation, general = _type_relation(triples, reading, options.reading, family)
    before = len(triples.entities)
    rows_before = sum(map(len, triples.splits.values()))
    triples, types, classes = types_from_triples(
        triples, relation, general, options.reading.max_types, options.num_parts
    )
    if len(triples.splits[TRAIN]) == 0:
        raise InputError(f"--types-from {types_from}: no triple is left to train on")
    reading.triples, reading.types = triples, types
    num_rows = rows_before - sum(map(len, triples.splits.values()))
    left_out = before - len(triples.entities)
    figures = {"from": types_from, "triples": num_rows, "entities_left_out": left_out, "classes": classes}
    reading.figures["types"] = figures
    reading.notes.append(
        f"{num_rows:,} triples of {types_from} became {len(types[0])} entity types; "
        f"{left_out:,} entities and classes without other triples are left out"
    )


def _type_relation(
    triples: IdTriples, reading: Reading, options: ReadingOptions, family: str
) -> tuple[int, np.ndarray]:
    """Return the id of the relation, and which entities are classes that say nothing."""
    types_from = options.types_from or ""
    no_class = np.zeros(len(triples.entities), dtype=bool)
    if family == GRAPHML:
        if TYPE_RELATION not in triples.relations:
            raise InputError(f"--types-from: no node has the attribute {types_from!r}")
        return triples.relations.index(TYPE_RELATION), no_class
    name = types_from
    if family == RDF:
        table = PrefixTable(reading.figures["prefixes"])
        iri = PrefixTable(options.prefixes, reading.figures["prefixes"], WELL_KNOWN).expand(types_from)
        name = table.shorten(iri)
        for id_, entity in enumerate(triples.entities):
            # Classes of literals and blank nodes (restrictions of OWL) have no name to use.
            no_class[id_] = entity[0] in '"_' or table.expand(entity) in _TOO_GENERAL
    if name not in triples.relations:
        raise unknown_name("relation of --types-from", types_from, triples.relations)
    return triples.relations.index(name), no_class


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
        counts = np.bincount(self.type_of, minlength=len(self.types))
        return {type_: int(count) for type_, count in zip(self.types, counts)}

    def vocabularies(self, names: Sequence[str]) -> Iterator[tuple[str, Vocabulary | NameList]]:
        """Yield each type and the names of its entities by original id, out of the names of all entities."""
        for number, type_ in enumerate(self.types):
            members = np.flatnonzero(self.type_of == number)
            if isinstance(names, NameList):
                yield type_, names if len(members) == len(names) else names.take(members)
            else:
                yield type_, Vocabulary([names[place] for place in members.tolist()], "entity")

    def relation_ids(self, triples: np.ndarray) -> np.ndarray:
        """Return the original relation id of each triple, (n,) int64."""
        if len(self.types) == 1:
            # Each relation id has its one key, those that no triple has too: ids are places.
            return triples[:, 1].astype(np.int64)
        num_times = self.relations.num_times
        keys = _keys(triples, self.type_of, len(self.types), num_times)
        return np.searchsorted(self.relation_keys, keys) * num_times + triples[:, 1] % num_times

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


def assign_ids(triples: IdTriples, types: list[str], type_of: np.ndarray) -> TypedIds:
    """Plan the original ids of triples without types, by the index (num_entities,) int32 of each one's type.

    A relation id that no triple has (an id map may list some) becomes a relation between the first types, so
    that it keeps its place.
    """
    id_in_type = np.empty(len(type_of), dtype=np.int32)
    for index in range(len(types)):
        members = np.flatnonzero(type_of == index)
        id_in_type[members] = np.arange(len(members), dtype=np.int32)
    key_pieces = (
        _keys(piece, type_of, len(types), triples.num_times)
        for rows in triples.splits.values()
        for _, (piece,) in pieces(rows)
    )
    relation_names = triples.relations
    keys = distinct_numbers(key_pieces, len(relation_names) * len(types) ** 2)
    # A key is (name * types + lhs) * types + rhs; dividing by types squared gives the name back.
    unused = np.setdiff1d(np.arange(len(relation_names)), keys // len(types) ** 2)
    keys = np.union1d(keys, unused * len(types) ** 2)
    relations = []
    for key in keys.tolist():
        rest, rhs = divmod(key, len(types))
        name, lhs = divmod(rest, len(types))
        relations.append(Relation(relation_names[name], types[lhs], types[rhs]))
    return TypedIds(types, type_of, id_in_type, RelationVocabulary(relations, triples.times), keys)


def _keys(triples: np.ndarray, type_of: np.ndarray, num_types: int, num_times: int) -> np.ndarray:
    keys = triples[:, 1].astype(np.int64) // num_times
    if num_types == 1:
        return keys
    keys = keys * num_types + type_of[triples[:, 0]]
    return keys * num_types + type_of[triples[:, 2]]
