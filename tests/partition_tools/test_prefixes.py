"""Short names of IRIs can be undone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dglkge.errors import InputError
from dglkge.partition.entity_types import type_names
from dglkge.partition.options import parse_prefixes
from dglkge.partition.readers.rdf import WELL_KNOWN, PrefixTable

# Few characters, so that IRIs begin with one another and schemes are prefixes.
STEMS = st.text("ab:/#", max_size=4).map(lambda text: "a:" + text)
NAMES = st.text("ab", max_size=2)
TABLES = st.dictionaries(NAMES, STEMS, max_size=5)


@given(TABLES, TABLES, st.lists(STEMS, max_size=20))
def test_expand_undoes_shorten(first, second, iris):
    table = PrefixTable(first, second)
    short = {iri: table.shorten(iri) for iri in iris}
    assert all(table.expand(name) == iri for iri, name in short.items())
    assert len(set(short.values())) == len(short)
    # The prefixes that were used are enough to undo it.
    used = PrefixTable(table.used)
    assert all(used.expand(name) == iri for iri, name in short.items())


@given(TABLES, STEMS)
def test_the_longest_iri_wins(table, iri):
    kept = PrefixTable(table).iris
    candidates = [stem for stem in kept.values() if iri.startswith(stem)]
    name = PrefixTable(table).shorten(iri)
    if candidates:
        stem = max(candidates, key=len)
        assert name == f"{[prefix for prefix in kept if kept[prefix] == stem][0]}:{iri[len(stem) :]}"
    else:
        assert name in (iri, f"<{iri}>")


def test_earlier_tables_win():
    table = PrefixTable({"foaf": "http://mine.org/"}, WELL_KNOWN, {"x": WELL_KNOWN["skos"]})
    assert table.shorten("http://mine.org/a") == "foaf:a"
    assert table.shorten(WELL_KNOWN["foaf"] + "name") == WELL_KNOWN["foaf"] + "name"
    assert table.shorten(WELL_KNOWN["skos"] + "broader") == "skos:broader"
    assert table.shorten("http://purl.obolibrary.org/obo/GO_0008150") == "go:0008150"
    assert table.shorten("geo:48.2,16.3") == "<geo:48.2,16.3>"


def test_well_known_prefixes_are_all_different():
    assert len(set(WELL_KNOWN.values())) == len(WELL_KNOWN)


def test_parse_prefixes():
    assert parse_prefixes(["ex=http://e.org/", "y:=http://y.org/?a=b", "=http://z.org/"]) == {
        "ex": "http://e.org/",
        "y": "http://y.org/?a=b",
        "": "http://z.org/",
    }
    with pytest.raises(InputError, match="--prefix 'ex' is not allowed; give name=IRI"):
        parse_prefixes(["ex"])
    with pytest.raises(InputError, match="--prefix 'ex' is given twice: a: and b:"):
        parse_prefixes(["ex=a:", "ex=b:"])


def test_names_of_types():
    classes = ["http://a.org/x#Big City", "relation", "untyped", "ex:a__b", "ex:", "http://a.org/Été"]
    assert type_names(classes) == ["Big_City", "relation-2", "untyped-2", "a_b", "ex", "t"]
    assert type_names(["a:X", "b:X", "a/X"]) == ["a_X", "b_X", "a_X-2"]
