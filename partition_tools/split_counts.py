"""Counts what a user should know about the splits: duplicates, and what training never sees."""

from __future__ import annotations

import numpy as np


def count_duplicates(triples: np.ndarray) -> int:
    """Return how many of the triples (n, 3) repeat an earlier one."""
    if len(triples) == 0:
        return 0
    order = np.lexsort((triples[:, 2], triples[:, 1], triples[:, 0]))
    repeats = np.ones(len(triples) - 1, dtype=bool)
    for column in range(3):
        values = triples[order, column]
        repeats &= values[1:] == values[:-1]
    return int(repeats.sum())


def count_unseen(
    splits: dict[str, np.ndarray], relation_ids: dict[str, np.ndarray], num_entities: int, num_relations: int
) -> dict[str, dict[str, int]]:
    """Count entities and relations that occur in valid or test, but never in training.

    Parameters
    ----------
    splits : dict of str to (n, 3) int
        Triples of each split, entities numbered without regard to type.
    relation_ids : dict of str to (n,) int64
        Relation of each triple (a name between two other types is another relation).
    num_entities, num_relations : int
        How many there are.

    Returns
    -------
    dict of str to dict
        For each split but train, and for both together as ``valid_and_test``: ``entities`` and ``relations``
        (distinct ones), ``triples`` (those with at least one).
    """
    new_entity = np.ones(num_entities, dtype=bool)
    new_entity[splits["train"][:, 0]] = False
    new_entity[splits["train"][:, 2]] = False
    new_relation = np.ones(num_relations, dtype=bool)
    new_relation[relation_ids["train"]] = False
    counts = {}
    both = np.zeros(num_entities, dtype=bool), np.zeros(num_relations, dtype=bool)
    num_triples = 0
    for split in ("valid", "test"):
        heads, tails = splits[split][:, 0], splits[split][:, 2]
        entities = np.zeros(num_entities, dtype=bool)
        entities[heads] = entities[tails] = True
        relations = np.zeros(num_relations, dtype=bool)
        relations[relation_ids[split]] = True
        entities &= new_entity
        relations &= new_relation
        touched = int((new_entity[heads] | new_entity[tails] | new_relation[relation_ids[split]]).sum())
        counts[split] = _count(entities, relations, touched)
        both = both[0] | entities, both[1] | relations
        num_triples += touched
    counts["valid_and_test"] = _count(*both, num_triples)
    return counts


def _count(entities: np.ndarray, relations: np.ndarray, num_triples: int) -> dict[str, int]:
    return {"entities": int(entities.sum()), "relations": int(relations.sum()), "triples": num_triples}
