"""Relations: labels, ambiguous names, the file."""

from __future__ import annotations

import pytest

from dglkge.data.vocabulary import RelationVocabulary
from dglkge.errors import InputError
from dglkge.typing import Relation

RELATIONS = [
    Relation("born_in", "person", "town"),
    Relation("near", "person", "town"),
    Relation("near", "town", "town"),
]


@pytest.fixture
def vocabulary() -> RelationVocabulary:
    """Three relations, two of the same name."""
    return RelationVocabulary(RELATIONS)


def test_label_has_types_only_where_the_name_is_ambiguous(vocabulary):
    assert list(vocabulary.labels.names) == ["born_in", "near (person → town)", "near (town → town)"]


def test_every_label_gives_its_id(vocabulary):
    assert [vocabulary.id(label) for label in vocabulary.labels.names] == [0, 1, 2]
    assert len(vocabulary) == 3 and vocabulary[2] == RELATIONS[2]


def test_name_with_enough_types_gives_the_id(vocabulary):
    assert vocabulary.id("born_in") == 0
    assert vocabulary.id("near", lhs="town") == 2
    assert vocabulary.id("near", lhs="person", rhs="town") == 1


def test_ambiguous_name_lists_the_labels(vocabulary):
    with pytest.raises(
        InputError, match="'near' joins several pairs.*'near \\(person → town\\)', 'near \\(town"
    ):
        vocabulary.id("near")
    with pytest.raises(InputError, match="joins several pairs"):
        vocabulary.id("near", rhs="town")


def test_types_that_do_not_fit_are_an_error(vocabulary):
    with pytest.raises(InputError, match="'near' does not join any → person; known: "):
        vocabulary.id("near", rhs="person")
    with pytest.raises(InputError, match="does not join town → any"):
        vocabulary.id("born_in", lhs="town")


def test_unknown_name_shows_near_labels(vocabulary):
    with pytest.raises(InputError, match="unknown relation 'born_im'; did you mean 'born_in'"):
        vocabulary.id("born_im")


def test_file_round_trip(tmp_path, vocabulary):
    path = tmp_path / "relations.tsv"
    vocabulary.save(path)
    assert path.read_text(encoding="utf-8").splitlines()[1] == "near\tperson\ttown"
    assert RelationVocabulary.load(path).relations == RELATIONS


def test_line_with_other_fields_is_named(tmp_path):
    path = tmp_path / "relations.tsv"
    path.write_text("a\tb\tc\na\tb\n")
    with pytest.raises(InputError, match="relations.tsv:2: got 2 fields"):
        RelationVocabulary.load(path)
