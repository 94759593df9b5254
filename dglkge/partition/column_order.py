"""Recognises columns in another order than they are read, for instance head, tail, relation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

from dglkge.data.text_format import ROLES, Columns
from dglkge.partition.rows import distinct_below

MIN_RELATIONS = 10
"""With fewer distinct values in the column of relations, nothing is suspicious."""

FAR_FEWER = 0.1
"""A column with at most this share of the distinct values of another has far fewer."""


def column_order_advice(
    splits: Mapping[str, np.ndarray],
    columns: Columns,
    entities: Sequence[str] | None = None,
    relations: Sequence[str] | None = None,
) -> str | None:
    """Return one line if another column looks like that of the relations, else None.

    Parameters
    ----------
    splits : mapping of str to (n, 3) int
        The triples as they were read.
    columns : Columns
        The order in which the columns were read.
    entities, relations : sequence of str, optional
        The sorted names of the ids, if the triples are of names.
    """
    found = [distinct_below(list(splits.values()), column) for column in range(3)]
    if len(found[1]) < MIN_RELATIONS:
        return None
    counts = ", ".join(f"{len(values):,} {role}s" for values, role in zip(found, ROLES))
    are_integers = True
    if entities is not None and relations is not None:
        found[1] = _as_entities(entities, relations)
        are_integers = all(map(str.isdigit, relations)) and all(map(str.isdigit, entities))
    role = misplaced_relations(found[0], found[1], found[2], are_integers)
    if role is None:
        return None
    return (
        f"the columns look as if they were in another order: {counts}; "
        f"if what was read as {role} is the relation, give --columns {_swapped(columns, role)}"
    )


def misplaced_relations(
    heads: np.ndarray, relations: np.ndarray, tails: np.ndarray, are_integers: bool
) -> str | None:
    """Return the role whose column looks like that of the relations, None if the order looks right.

    Parameters
    ----------
    heads, relations, tails : (n,) int
        Distinct values of each column; equal numbers stand for equal text.
    are_integers : bool
        Whether the values are ids from 0. Names of relations differ from those of entities, ids do not.

    Returns
    -------
    str or None
        ``"head"`` or ``"tail"``.
    """
    for role, column, other in (("tail", tails, heads), ("head", heads, tails)):
        if are_integers:
            likeness = _jaccard(relations, other)
            is_like_other = likeness >= 0.5
            # What is not asked for below is not computed: the columns of entities are long.
            is_unlike = is_like_other and _jaccard(column, other) <= likeness / 2
        else:
            is_like_other = _shared(relations, other) >= 0.5 * len(relations)
            is_unlike = is_like_other and (
                int((_within(column, relations) | _within(column, other)).sum()) <= 0.05 * len(column)
            )
        # As many values as entities: a fourth of those in the other column, or more.
        is_as_large = 4 * len(relations) >= len(other)
        if len(column) <= FAR_FEWER * len(relations) and (is_like_other or is_as_large):
            return role
        # Of RDF, relations may be described as heads: then heads are far more than relations.
        if is_like_other and is_unlike and len(column) <= 5 * len(relations):
            return role
    return None


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    few, many = sorted((one, other), key=len)
    return int(_within(few, many).sum())


def _within(some: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return whether each number is among ascending ones, (n,) bool."""
    if len(values) == 0:
        return np.zeros(len(some), bool)
    found: np.ndarray = values[np.minimum(np.searchsorted(values, some), len(values) - 1)] == some
    return found


def _jaccard(one: np.ndarray, other: np.ndarray) -> float:
    shared = _shared(one, other)
    return shared / (len(one) + len(other) - shared)


def _as_entities(entities: Sequence[str], relations: Sequence[str]) -> np.ndarray:
    """Return the relations' names as ids of the entities of that name, or as new ids; ascending."""
    ids = []
    for number, name in enumerate(relations):
        # Both are sorted; a dict of the entities would take more memory than the triples.
        place = bisect_left(entities, name)
        known = place < len(entities) and entities[place] == name
        ids.append(place if known else len(entities) + number)
    return np.sort(ids)


def _swapped(columns: Columns, role: str) -> str:
    """Return the value of ``--columns`` in which a role and the relation change places."""
    swap = {role: "relation", "relation": role}
    if columns.names:
        return ",".join(f"{swap.get(one, one)}={name}" for one, name in columns.names.items())
    return ",".join(swap.get(one, one) for one in columns.order)
