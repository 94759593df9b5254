"""Queries by names: looked up, and read from files."""

from __future__ import annotations

import re

import pytest

from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.errors import InputError
from dglkge.inference.search import LinkQuery, NamedQuery, read_queries, resolve
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


def test_a_query_reads_like_a_triple():
    assert str(NamedQuery(Side.TAIL, "Ann", "made")) == "(Ann, made, ?)"
    assert str(NamedQuery(Side.HEAD, "Kes", "made")) == "(?, made, Kes)"


def test_queries_from_a_file(tmp_path):
    path = tmp_path / "queries.tsv"
    path.write_text("Ann\tmade\t?\n\n?\tlikes\tBob the builder\r\n", encoding="utf-8")
    assert read_queries(path) == (
        [("Ann", "made", "?"), ("?", "likes", "Bob the builder")],
        [f"{path}:1", f"{path}:3"],
    )
    path.write_text("A\u2028n\x85n\t?\tmade\n", encoding="utf-8")
    assert read_queries(path) == ([("A\u2028n\x85n", "?", "made")], [f"{path}:1"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b"Ann\tmade\t?\nAnn made ?\n",
            "q.tsv:2: got 'Ann made ?'; expected head, relation and tail separated by tabs",
        ),
        (b"Ann\tmade\tKes\n", "q.tsv:1: got "),
        (b"?\tmade\t?\n", "q.tsv:1: got "),
        (b"\n", "q.tsv has no queries"),
        (b"\xff\t\t?\n", "q.tsv is not UTF-8: invalid start byte at byte 0"),
        (None, "q.tsv: No such file or directory"),
    ],
)
def test_files_that_are_no_queries(tmp_path, content, words):
    path = tmp_path / "q.tsv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(words)):
        read_queries(path)
