"""Queries by names."""

from __future__ import annotations

import re

import pytest

from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.errors import InputError
from dglkge.inference.search import LinkQuery, NamedQuery, resolve
from dglkge.typing import Relation, Side

RELATIONS = RelationVocabulary(
    [
        Relation("likes", "person", "person"),
        Relation("made", "person", "film"),
        Relation("likes", "person", "film"),
        Relation("likes", "film", "film"),
    ]
)
NAMES = {
    "person": Vocabulary(["Ann", "Bob", "It"], "entity"),
    "film": Vocabulary(["Brazil", "Kes", "It"], "entity"),
}


def lookup(side, entity, relation):
    return resolve(NamedQuery(side, entity, relation), RELATIONS, NAMES.__getitem__)


def test_names_to_ids():
    assert lookup(Side.TAIL, "Bob", "made") == LinkQuery(Side.TAIL, 1, 1)
    assert lookup(Side.HEAD, "Kes", "made") == LinkQuery(Side.HEAD, 1, 1)
    assert lookup(Side.TAIL, "Ann", "likes (person → film)") == LinkQuery(Side.TAIL, 0, 2)
    assert lookup(Side.HEAD, "It", "likes (film → film)") == LinkQuery(Side.HEAD, 2, 3)


def test_the_entity_settles_which_relation():
    assert lookup(Side.TAIL, "Kes", "likes") == LinkQuery(Side.TAIL, 1, 3)
    assert lookup(Side.HEAD, "Ann", "likes") == LinkQuery(Side.HEAD, 0, 0)


def test_an_ambiguous_relation():
    with pytest.raises(
        InputError, match=re.escape("say which: 'likes (person → person)', 'likes (person → film)'")
    ):
        lookup(Side.TAIL, "Ann", "likes")


def test_unknown_names():
    with pytest.raises(InputError, match="unknown entity 'Anne'; did you mean 'Ann'"):
        lookup(Side.TAIL, "Anne", "made")
    with pytest.raises(InputError, match="unknown relation 'mad'; did you mean 'made'"):
        lookup(Side.TAIL, "Ann", "mad")
    with pytest.raises(InputError, match="unknown entity 'Kes'"):
        lookup(Side.TAIL, "Kes", "made")
