"""Entity types from triples such as ``x rdf:type C``: one main type for each entity."""

from __future__ import annotations

import re

import numpy as np

from dglkge.partition.ingest import IdTriples
from dglkge.partition.inputs import type_name_fault
from dglkge.partition.readers.prefixes import WELL_KNOWN

UNTYPED = "untyped"
"""Type of the entities without a class that became one."""

_TOO_GENERAL = (
    WELL_KNOWN["owl"] + "Thing",
    WELL_KNOWN["owl"] + "NamedIndividual",
    WELL_KNOWN["rdfs"] + "Resource",
)


def too_general(iri: str) -> bool:
    """Return whether a class says nothing about its members."""
    return iri in _TOO_GENERAL


def main_types(
    pairs: np.ndarray, num_entities: int, usable: np.ndarray, max_types: int, min_size: int
) -> np.ndarray:
    """Choose one class for each entity: the one of its classes with the most members.

    Few large types are what a data set needs: a partition owns an entity of every type, and pairs of types
    become edge types.

    Parameters
    ----------
    pairs : (n, 2) int
        Entity and class, as entity ids.
    num_entities : int
        Number of entities.
    usable : (num_entities,) bool
        Whether an entity has a type at all: it is in a triple that stays.
    max_types : int
        Number of classes that become types. An entity of another class gets the largest of its classes
        that did, or none.
    min_size : int
        Least number of entities of a type.

    Returns
    -------
    (num_entities,) int64
        A class, or -1.
    """
    pairs = np.unique(pairs[usable[pairs[:, 0]]].astype(np.int64), axis=0)
    # Members that no triple has would make a class large that then has few entities.
    members = np.bincount(pairs[:, 1], minlength=num_entities)
    chosen = _largest(pairs, members, num_entities)
    kept = np.zeros(num_entities, dtype=bool)
    sizes = np.bincount(chosen[chosen >= 0], minlength=num_entities)
    kept[np.argsort(-sizes, kind="stable")[:max_types]] = True
    while True:
        chosen = _largest(pairs[kept[pairs[:, 1]]], members, num_entities)
        sizes = np.bincount(chosen[chosen >= 0], minlength=num_entities)
        small = kept & (sizes > 0) & (sizes < min_size)
        if not small.any():
            return chosen
        # Its members may have another class; which in turn may become large enough.
        kept &= ~small


def _largest(pairs: np.ndarray, members: np.ndarray, num_entities: int) -> np.ndarray:
    """Return for each entity the class with the most members, of equal ones the first by name."""
    chosen = np.full(num_entities, -1, dtype=np.int64)
    # Ids follow names; of several assignments to one entity the last holds.
    order = np.lexsort((-pairs[:, 1], members[pairs[:, 1]]))
    chosen[pairs[order, 0]] = pairs[order, 1]
    return chosen


def types_from_triples(
    triples: IdTriples, relation: int, general: np.ndarray, max_types: int, min_size: int
) -> tuple[IdTriples, tuple[list[str], np.ndarray], dict[str, str]]:
    """Take the triples of a relation out as entity types.

    Parameters
    ----------
    triples : IdTriples
        All splits.
    relation : int
        The relation whose tails are classes.
    general : (num_entities,) bool
        Classes that are not used.
    max_types, min_size : int
        As for :func:`main_types`.

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
    chosen = main_types(all_pairs, num_entities, used, max_types, min_size)[used]
    places = (np.cumsum(used) - 1).astype(np.int32)
    for rows in splits.values():
        rows[:, 0], rows[:, 2] = places[rows[:, 0]], places[rows[:, 2]]
        rows[:, 1] -= rows[:, 1] > relation
    classes = np.unique(chosen[chosen >= 0]).tolist()
    names = type_names([triples.entities[class_] for class_ in classes])
    has_untyped = bool((chosen < 0).any())
    present = sorted([*names, *([UNTYPED] if has_untyped else [])])
    # By class, the last place for none: -1 is its index.
    lookup = np.zeros(num_entities + 1, dtype=np.int32)
    for class_, name in [*zip(classes, names), *([(-1, UNTYPED)] if has_untyped else [])]:
        lookup[class_] = present.index(name)
    entities = [name for name, is_used in zip(triples.entities, used.tolist()) if is_used]
    relations = [name for id_, name in enumerate(triples.relations) if id_ != relation]
    kept = IdTriples(entities, relations, splits, weights)
    classes_of = {name: triples.entities[class_] for class_, name in zip(classes, names)}
    return kept, (present, lookup[chosen]), dict(sorted(classes_of.items()))


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
