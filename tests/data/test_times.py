"""Times of triples: their order, granularity, and relations at a time."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.data.vocabulary import RelationVocabulary, at_times, extended, in_time_order, label_at
from dglkge.errors import InputError
from dglkge.typing import Relation

RELATIONS = [Relation("visits", "person", "town"), Relation("near", "town", "town")]


@pytest.mark.parametrize(
    ("stamps", "granularity", "times"),
    [
        (["10", "9", "-3"], None, ["-3", "9", "10"]),
        (["2014", "999", "2020"], None, ["999", "2014", "2020"]),
        (["2014-10-01", "2014-09-30"], None, ["2014-09-30", "2014-10-01"]),
        (["2014-10-01", "2014-09-30", "2014-09-02"], "month", ["2014-09", "2014-10"]),
        (["2014-10-01", "2013-09-30", "2014-09-02"], "year", ["2013", "2014"]),
        (["2014-10-01T12:00", "2014-10-01T09:30"], None, ["2014-10-01T09:30", "2014-10-01T12:00"]),
        (["2014-10-01 12:00:00", "2014-10-01 09:30:00"], "day", ["2014-10-01"]),
        (["2014", "2012"], "year", ["2012", "2014"]),
    ],
)
def test_times_are_in_their_order(stamps, granularity, times):
    found, places = in_time_order(stamps, granularity)
    assert found == times
    assert [stamp.startswith(found[place]) for stamp, place in zip(stamps, places)] == [True] * len(stamps)


@pytest.mark.parametrize(
    ("stamps", "granularity", "message"),
    [
        (["2014-01-01", "May"], None, "the time is 'May' and another '2014-01-01'; allowed: all integers"),
        (["2014-01-01", "2014-02-30"], None, "the time is '2014-02-30'"),
        (["2014-01-01", "2014-02"], None, "the time is '2014-02'"),
        (["12", "2014-02"], None, "the time is '2014-02' and another '12'"),
        (["12", "13"], "year", "the time is '12'"),
        (["2014", "2015"], "month", "the time '2014' has no month; allowed: a coarser granularity"),
        (["1", "01"], None, "two texts of the time column are one integer"),
    ],
)
def test_other_times_are_refused(stamps, granularity, message):
    with pytest.raises(InputError) as caught:
        in_time_order(stamps, granularity)
    assert str(caught.value).startswith(message)


def test_numbers_of_relations_at_a_time():
    made = at_times(RELATIONS, ["1", "2", "3"])
    assert [one.name for one in made] == [label_at(r.name, t) for r in RELATIONS for t in "123"]
    assert [(one.lhs, one.rhs) for one in made] == [("person", "town")] * 3 + [("town", "town")] * 3
    assert at_times(RELATIONS, []) == RELATIONS
    # The map of an edge's relation goes with that of its row, and the time stays.
    node_ids = np.array([2, 0, 1])
    numbers = np.arange(12)
    assert (extended(node_ids, 4) // 4 == node_ids[numbers // 4]).all()
    assert (extended(node_ids, 4) % 4 == numbers % 4).all()
    assert extended(np.argsort(node_ids), 4)[extended(node_ids, 4)].tolist() == numbers.tolist()


def test_vocabulary(tmp_path):
    made = RelationVocabulary(RELATIONS, ["2013", "2014"])
    assert len(made) == 4 and made.num_times == 2 and made.timeless == RELATIONS
    assert made.id("near @ 2014") == 3 and made.ids_of("visits @ 2013") == [0]
    assert (
        made.at("visits", None) == [0, 1]
        and made.at(None, "2014") == [1, 3]
        and made.at("near", "2013") == [2]
    )
    assert made.at(None, None) == [0, 1, 2, 3]
    made.save(tmp_path / "relations.tsv")
    assert RelationVocabulary.load(tmp_path / "relations.tsv").relations == RELATIONS
    again = RelationVocabulary.load(tmp_path / "relations.tsv", made.times)
    assert again.relations == made.relations
    for call, message in (
        (lambda: made.id("visits"), "relation 'visits' has times, from 2013 to 2014; say which"),
        (lambda: made.at("visit", "2014"), "unknown relation 'visit'; did you mean 'visits'?"),
        (lambda: made.at("visits", "2015"), "unknown time '2015'; did you mean '2014' or '2013'?"),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value).startswith(message)
