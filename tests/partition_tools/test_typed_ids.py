"""Original ids within types, and one relation per name and pair of types."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.partition.dataset_writer import pairs_of_types
from dglkge.partition.entity_types import assign_ids

TYPES = ["person", "town"]
TYPE_OF = np.array([1, 0, 1, 0, 0], dtype=np.int32)
TRAIN = np.array([[1, 1, 0], [1, 0, 3], [0, 1, 2]], dtype=np.int32)
TEST = np.array([[4, 1, 2], [3, 1, 4]], dtype=np.int32)


@pytest.fixture
def ids():
    """``knows`` joins persons; ``near`` joins person and town, town and town and, in test alone, persons."""
    return assign_ids({"train": TRAIN, "test": TEST}, ["knows", "near"], TYPES, TYPE_OF)


def test_ids_count_within_types(ids):
    assert ids.id_in_type.tolist() == [0, 0, 1, 1, 2]
    assert ids.num_entities() == {"person": 3, "town": 2}
    names = {type_: list(names.names) for type_, names in ids.vocabularies("abcde")}
    assert names == {"person": ["b", "d", "e"], "town": ["a", "c"]}


def test_a_name_that_joins_several_pairs_is_several_relations(ids):
    found = [(r.name, r.lhs, r.rhs) for r in ids.relations.relations]
    assert found == [
        ("knows", "person", "person"),
        ("near", "person", "person"),
        ("near", "person", "town"),
        ("near", "town", "town"),
    ]


def test_relation_fixes_the_types_of_every_triple(ids):
    for triples in (TRAIN, TEST):
        for (head, _, tail), relation in zip(triples.tolist(), ids.relation_ids(triples).tolist()):
            assert ids.relations[relation].lhs == TYPES[TYPE_OF[head]]
            assert ids.relations[relation].rhs == TYPES[TYPE_OF[tail]]


def test_original_ids(ids):
    original = ids.original_ids(TRAIN)
    assert original.dtype == np.int64 and original.tolist() == [[0, 2, 0], [0, 0, 1], [0, 3, 1]]


def test_ranks_of_pairs_follow_first_relations(ids):
    pairs, ranks = pairs_of_types(ids.relations)
    assert pairs == [("person", "person"), ("person", "town"), ("town", "town")]
    assert ranks.tolist() == [0, 0, 1, 2]


def test_relation_that_no_triple_has_keeps_its_place():
    ids = assign_ids({"train": TRAIN[:1]}, ["unused", "near", "unused too"], TYPES, TYPE_OF)
    assert [r.name for r in ids.relations.relations] == ["unused", "near", "unused too"]
    assert ids.relation_ids(TRAIN[:1]).tolist() == [1]


def test_one_type_changes_nothing():
    ids = assign_ids({"train": TRAIN}, ["a", "b"], ["entity"], np.zeros(5, dtype=np.int32))
    assert np.array_equal(ids.original_ids(TRAIN), TRAIN)
