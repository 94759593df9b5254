"""Names that must survive, unknown and ambiguous ones; times: order, granularity, relations at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dglkge.data import vocabulary as vocabulary_module
from dglkge.data.vocabulary import (
    MappedNames,
    RelationVocabulary,
    Vocabulary,
    at_times,
    extended,
    in_time_order,
    label_at,
    read_lines,
)
from dglkge.errors import MAX_NAMES_TO_COMPARE, InputError
from dglkge.typing import Relation

AWKWARD = ["NA", "null", "1e5", ' "quoted" ', "#comment", "tab\tin", "line\u2028end", "a\rb", "Ōsaka", ""]
BORN, NEAR = Relation("born_in", "person", "town"), Relation("near", "town", "town")
RELATIONS = [BORN, Relation("near", "person", "town"), NEAR]


def test_ids_are_places():
    vocabulary = Vocabulary(["b", "a", "c"], "entity")
    assert len(vocabulary) == 3 and [vocabulary[i] for i in range(3)] == ["b", "a", "c"]
    assert vocabulary.id("a") == 1 and "a" in vocabulary and "d" not in vocabulary
    for names, expected in ((["c", "b", "c"], [2, 0, 2]), ([], [])):
        ids = vocabulary.ids(names)
        assert ids.dtype == np.int64 and ids.tolist() == expected


@given(names=st.lists(st.text(st.characters(exclude_characters="\n", codec="utf-8")), unique=True))
def test_any_names_survive(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("names") / "names.txt"
    Vocabulary(names, "entity").save(path)
    assert read_lines(path) == list(Vocabulary.load(path, "entity").names) == names
    mapped = MappedNames(path)
    assert len(mapped) == len(names) and list(mapped) == names
    assert [mapped[-place] for place in range(1, len(names) + 1)] == names[::-1]
    assert mapped[1:3] == names[1:3]


def test_awkward_names_survive(tmp_path, monkeypatch):
    path = tmp_path / "names.txt"
    for block in (1, 8):
        monkeypatch.setattr(vocabulary_module, "NAMES_BLOCK_BYTES", block)
        Vocabulary(AWKWARD, "entity").save(path)
        assert path.read_bytes() == "".join(f"{name}\n" for name in AWKWARD).encode()
        loaded = Vocabulary.load(path, "entity")
        assert loaded.ids(AWKWARD).tolist() == list(range(len(AWKWARD)))
        assert list(MappedNames(path)) == list(loaded.names) == AWKWARD
        with pytest.raises(IndexError):
            MappedNames(path)[len(AWKWARD)]
        path.write_bytes(b"a\nbb\n\xff\n")
        with pytest.raises(InputError, match="not UTF-8: invalid start byte at byte 5"):
            MappedNames(path)


def test_unknown_name_shows_near_ones():
    """Of many names those that begin alike are compared."""
    with pytest.raises(InputError, match=r"unknown entity 'Pariss'; did you mean 'Paris'\?"):
        Vocabulary(["Rome", "Paris"], "entity").id("Pariss")
    names = [f"x{i}" for i in range(MAX_NAMES_TO_COMPARE)] + ["Strasbourg", "Stuttgart"]
    vocabulary = Vocabulary(names, "entity")
    with pytest.raises(InputError, match="did you mean 'Strasbourg'"):
        vocabulary.id("strasburg")
    with pytest.raises(InputError, match="5002 are known, among them 'x0', 'x1'"):
        vocabulary.ids(["x0", "Quito"])


def test_a_damaged_file_is_an_input_error(tmp_path):
    path = tmp_path / "names.txt"
    for content, message in (
        (None, "cannot read"),
        (b"a\nb", "cut off"),
        (b"a\n\xff\n", "not UTF-8: invalid start byte at byte 2"),
    ):
        if content is not None:
            path.write_bytes(content)
        for load in (Vocabulary.load, lambda path, _: MappedNames(path)):
            with pytest.raises(InputError, match=message) as caught:
                load(path, "entity")
            assert str(path) in str(caught.value)


def test_relations_have_types_in_their_labels_only_where_the_name_is_ambiguous(tmp_path):
    vocabulary = RelationVocabulary(RELATIONS)
    vocabulary.save(tmp_path / "relations.tsv")
    assert (tmp_path / "relations.tsv").read_text(encoding="utf-8").splitlines()[1] == "near\tperson\ttown"
    assert RelationVocabulary.load(tmp_path / "relations.tsv").relations == RELATIONS
    labels = list(vocabulary.labels.names)
    assert labels == ["born_in", "near (person → town)", "near (town → town)"]
    assert [vocabulary.id(label) for label in labels] == [0, 1, 2]
    assert len(vocabulary) == 3 and vocabulary[2] == RELATIONS[2]
    assert vocabulary.id("near", lhs="town") == 2 and vocabulary.id("near", lhs="person", rhs="town") == 1
    for name, types, message in (
        ("near", {}, r"'near' joins several pairs.*'near \(person → town\)', 'near \(town"),
        ("near", {"rhs": "town"}, "joins several pairs"),
        ("near", {"rhs": "person"}, "'near' does not join any → person; known: "),
        ("born_in", {"lhs": "town"}, "does not join town → any"),
        ("born_im", {}, "unknown relation 'born_im'; did you mean 'born_in'"),
    ):
        with pytest.raises(InputError, match=message):
            vocabulary.id(name, **types)
    (tmp_path / "relations.tsv").write_text("a\tb\tc\na\tb\n")
    with pytest.raises(InputError, match="relations.tsv:2: got 2 fields"):
        RelationVocabulary.load(tmp_path / "relations.tsv")


TIMED = [Relation("visits", "person", "town"), NEAR]


def test_times_are_in_their_order():
    for stamps, granularity, times in (
        (["10", "9", "-3"], None, ["-3", "9", "10"]),
        (["2014", "999", "2020"], None, ["999", "2014", "2020"]),
        (["2014-10-01", "2014-09-30"], None, ["2014-09-30", "2014-10-01"]),
        (["2014-10-01", "2014-09-30", "2014-09-02"], "month", ["2014-09", "2014-10"]),
        (["2014-10-01", "2013-09-30", "2014-09-02"], "year", ["2013", "2014"]),
        (["2014-10-01T12:00", "2014-10-01T09:30"], None, ["2014-10-01T09:30", "2014-10-01T12:00"]),
        (["2014-10-01 12:00:00", "2014-10-01 09:30:00"], "day", ["2014-10-01"]),
        (["2014", "2012"], "year", ["2012", "2014"]),
    ):
        ordered, places = in_time_order(stamps, granularity)
        assert ordered == times
        assert all(stamp.startswith(ordered[place]) for stamp, place in zip(stamps, places, strict=True))


def test_other_times_are_refused():
    for stamps, granularity, message in (
        (["2014-01-01", "May"], None, "the time is 'May' and another '2014-01-01'; allowed: all integers"),
        (["2014-01-01", "2014-02-30"], None, "the time is '2014-02-30'"),
        (["2014-01-01", "2014-02"], None, "the time is '2014-02'"),
        (["2014-05-01T12:30", "2014-05-01T24:00"], None, "the time is '2014-05-01T24:00'"),
        (["2014-05-01T12:30", "2014-05-01T12:60"], None, "the time is '2014-05-01T12:60'"),
        (["2014-05-01T23:59:59", "2014-05-01T12:30:99"], None, "the time is '2014-05-01T12:30:99'"),
        (["12", "2014-02"], None, "the time is '2014-02' and another '12'"),
        (["12", "13"], "year", "the time is '12'"),
        (["2014", "2015"], "month", "the time '2014' has no month; allowed: a coarser granularity"),
        (["1", "01"], None, "two texts of the time column are one integer"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            in_time_order(stamps, granularity)


def test_numbers_of_relations_at_a_time():
    made = at_times(TIMED, ["1", "2", "3"])
    assert made == [Relation(label_at(r.name, time), r.lhs, r.rhs) for r in TIMED for time in "123"]
    assert at_times(TIMED, []) == TIMED
    # The map of an edge's relation goes with that of its row, and the time stays.
    node_ids, numbers = np.array([2, 0, 1]), np.arange(12)
    edge_ids = extended(node_ids, 4)
    assert (edge_ids == 4 * node_ids[numbers // 4] + numbers % 4).all()
    assert extended(np.argsort(node_ids), 4)[edge_ids].tolist() == numbers.tolist()


def test_relations_at_times(tmp_path):
    made = RelationVocabulary(TIMED, ["2013", "2014"])
    assert len(made) == 4 and made.num_times == 2 and made.timeless == TIMED
    assert made.id("near @ 2014") == 3 and made.ids_of("visits @ 2013") == [0]
    assert made.at("visits", None) == [0, 1] and made.at(None, "2014") == [1, 3]
    assert made.at("near", "2013") == [2]
    assert made.at(None, None) == [0, 1, 2, 3]
    made.save(tmp_path / "relations.tsv")
    assert RelationVocabulary.load(tmp_path / "relations.tsv").relations == TIMED
    again = RelationVocabulary.load(tmp_path / "relations.tsv", made.times)
    assert again.relations == made.relations
    with pytest.raises(InputError, match="^relation 'visits' has times, from 2013 to 2014; say which"):
        made.id("visits")
    with pytest.raises(InputError, match="^unknown relation 'visit'; did you mean 'visits'?"):
        made.at("visit", "2014")
    with pytest.raises(InputError, match="^unknown time '2015'; did you mean '2014' or '2013'?"):
        made.at("visits", "2015")
