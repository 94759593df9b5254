"""RDF in: formats, short names that can be undone, blank nodes, literals, graphs, errors with their lines."""

from __future__ import annotations

import bz2
import gzip
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dglkge.data.dataset_files import NUMERIC_LITERALS
from dglkge.errors import InputError
from dglkge.partition import ingest
from dglkge.partition.entity_types import type_names
from dglkge.partition.make_dataset import partition_triples
from dglkge.partition.options import Options, ReadingOptions, parse_prefixes
from dglkge.partition.readers.rdf import WELL_KNOWN, PrefixTable
from tests.partition_tools.conftest import named_triples, names, read

pytest.importorskip("pyoxigraph", reason="RDF is read by pyoxigraph, the extra rdf")

EX = "http://example.org/"
TURTLE = """\
@prefix ex: <http://example.org/> .
@prefix xsd: <http://www.w3.org/2001/XMLSchema#> .
# a comment with { braces }
ex:rome ex:capitalOf ex:italy ; ex:name "Roma"@it , "{Rome}" ; ex:population 2873000 .
ex:italy ex:borders ex:france, _:b0 ; ex:area "301230.5"^^xsd:double, "NaN"^^xsd:double .
_:b0 ex:name "Switz" ; ex:borders [ ex:in ex:europe ] .
"""
# What the statements above mean, written by hand.
TRIPLES = [
    ("_:t.[0]", "ex:in", "ex:europe"),
    ("_:t.b0", "ex:borders", "_:t.[0]"),
    ("ex:italy", "ex:borders", "_:t.b0"),
    ("ex:italy", "ex:borders", "ex:france"),
    ("ex:rome", "ex:capitalOf", "ex:italy"),
]
NT = """\
<http://example.org/rome> <http://example.org/capitalOf> <http://example.org/italy> .
<http://example.org/rome> <http://example.org/name> "Roma <a> <b> ."@it .
_:b0 <http://example.org/borders> <http://example.org/italy> . # the north
"""
NT_TRIPLES = [("_:t.b0", "ex:borders", "ex:italy"), ("ex:rome", "ex:capitalOf", "ex:italy")]
NQ = NT.replace("italy> .", "italy> <http://example.org/g1> .", 1).replace(
    "italy> . #", "italy> <http://example.org/g2> . #"
)
TRIG = TURTLE.replace("ex:rome ex:cap", "ex:g1 { ex:rome ex:cap").replace("2873000 .", "2873000 . }")


def write(path, text):
    pack = {".gz": gzip.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(text.encode()))
    return path


def test_formats_by_name_content_and_option(tmp_path, monkeypatch):
    """In chunks of two triples."""
    monkeypatch.setattr(ingest, "CHUNK_ROWS", 2)
    for name, text, line, expected in (
        ("t.turtle.gz", TURTLE, "Turtle, gzip (by name)", TRIPLES),
        ("t.nt.bz2", NT, "N-Triples, bzip2 (by name)", NT_TRIPLES),
        ("t.nq", NQ, "N-Quads (by name)", NT_TRIPLES),
        ("t.trig.bz2", TRIG, "TriG, bzip2 (by name)", TRIPLES),
        ("t.dump", TURTLE, "Turtle (by content)", TRIPLES),
        ("t", NT, "N-Triples (by content)", NT_TRIPLES),
        ("t.dat", NQ, "N-Quads (by content)", NT_TRIPLES),
        ("t.txt", NT, "Turtle (as --format says)", NT_TRIPLES),
    ):
        options = {"format": "turtle"} if "--format" in line else {}
        source, reading = read(write(tmp_path / name, text), prefixes={"ex": EX}, **options)
        assert source.line == f"input: {name}: {line}"
        assert sorted(names(reading)) == expected


def test_prefixes_and_full_iris(tmp_path):
    path = write(tmp_path / "t.ttl", TURTLE)
    _, reading = read(path)
    assert reading.triples.entities == sorted(reading.triples.entities)
    assert reading.triples.relations == ["ex:borders", "ex:capitalOf", "ex:in"]
    assert reading.figures["prefixes"] == {"ex": EX} and reading.figures["blank_nodes"] == 2
    _, reading = read(path, full_iris=True)
    assert (f"{EX}rome", f"{EX}capitalOf", f"{EX}italy") in names(reading)
    _, reading = read(path, prefixes={"it": EX + "it"})
    assert ("ex:rome", "ex:capitalOf", "it:aly") in names(reading)
    _, reading = read(write(path, "<a> <p> <#b> ."), base_iri=EX + "doc")
    assert sorted(names(reading)) == [(f"{EX}a", f"{EX}p", f"{EX}doc#b")]


def test_names_of_several_files(tmp_path):
    """A prefix is declared too late in the first and differs in the second; blank nodes are of a file."""
    first = write(tmp_path / "a.ttl", f"<{EX}a> <{EX}p> <{EX}b> .\n@prefix ex: <{EX}> .\nex:a ex:p ex:c .")
    second = write(tmp_path / "b.ttl", f"@prefix ex: <http://other.org/> .\nex:a ex:p <{EX}a> .")
    _, reading = read([first, second], split=(0.8, 0.1, 0.1))
    expected = [("ex:a", "ex:p", "ex:b"), ("ex:a", "ex:p", "ex:c")]
    assert sorted(names(reading)) == [*expected, ("http://other.org/a", "http://other.org/p", "ex:a")]
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
    blank = f"<{EX}a> <{EX}p> _:n .\n"
    paths = [write(tmp_path / place, blank) for place in ("x/t.nt", "y/t.nt", "u.nt.gz")]
    label = "a" * 32  # A label like a name that pyoxigraph draws is numbered.
    paths.append(write(tmp_path / "v.nt", f"_:{label} <{EX}p> _:{label[:-1]}b .\n"))
    _, reading = read(paths, split=(0.8, 0.1, 0.1))
    assert sorted(tail for _, _, tail in names(reading)) == ["_:t-2.n", "_:t.n", "_:u.n", "_:v.[1]"]
    assert "_:v.[0]" in reading.triples.entities


def test_literals_dropped_or_entities(tmp_path):
    path = write(tmp_path / "t.ttl", TURTLE)
    _, reading = read(path)
    assert reading.figures["literals"] == {"policy": "drop", "seen": 6}
    assert reading.notes[1:] == ["6 triples with literals dropped (see --literals)"]
    _, reading = read(path, literals="entities")
    literals = [name for name in reading.triples.entities if name.startswith('"')]
    numbers = ['"2873000"^^xsd:integer', '"301230.5"^^xsd:double', '"NaN"^^xsd:double']
    assert literals == [*numbers, '"Roma"@it', '"Switz"', '"{Rome}"']
    assert ("ex:rome", "ex:name", '"Roma"@it') in names(reading) and len(names(reading)) == len(TRIPLES) + 6
    # Line ends, quotes, and an unknown datatype.
    literal = '"1\\n\\"^^<x>\\t"^^<urn:t>'
    _, reading = read(write(tmp_path / "t.nt", f"<{EX}a> <{EX}p> {literal} .\n"), literals="entities")
    assert reading.triples.entities[0] == literal


def test_numbers_go_to_a_file_in_the_dataset(tmp_path, build_here):
    path = write(tmp_path / "t.ttl", TURTLE + "ex:nobody ex:age 3 .\n")
    figures = partition_triples([path], tmp_path / "out", Options(reading=ReadingOptions(literals="numeric")))
    rows = (tmp_path / "out" / NUMERIC_LITERALS).read_text().splitlines()
    assert rows == ["ex:rome\tex:population\t2873000", "ex:italy\tex:area\t301230.5"]
    # NaN is no number, and ex:nobody is in no triple with another entity.
    assert figures["input"]["literals"] == {"policy": "numeric", "seen": 7, "numeric": 3, "written": 2}
    assert sorted(named_triples(tmp_path / "out", "train")) == TRIPLES
    described = json.loads((tmp_path / "out" / "dataset.json").read_text())["input"]
    assert described == figures["input"] and described["prefixes"] == {"ex": EX}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "t.ttl"]


def test_named_graphs_are_ignored_and_counted_or_chosen(tmp_path):
    path = write(tmp_path / "t.nq", NQ)
    _, reading = read(path, prefixes={"ex": EX})
    assert (reading.figures["quads_in_named_graphs"], reading.figures["named_graphs"]) == (2, 2)
    assert "2 triples in 2 named graphs, whose names are ignored" in reading.notes
    _, reading = read(path, prefixes={"ex": EX}, graphs=("ex:g2",))
    assert sorted(names(reading)) == NT_TRIPLES[:1]
    assert reading.figures["outside_wanted_graphs"] == 2
    _, reading = read(write(tmp_path / "t.trig", TRIG), graphs=("default",))
    assert sorted(names(reading)) == TRIPLES[:4]
    with pytest.raises(InputError, match="t.nq: no triple is in the graph ex:g3; its named graphs are .*/g1"):
        read(path, graphs=("ex:g3",))


TYPED = """\
@prefix : <http://example.org/> . @prefix foaf: <http://xmlns.com/foaf/0.1/> .
@prefix owl: <http://www.w3.org/2002/07/owl#> . @prefix schema: <http://schema.org/> .
:ann a foaf:Person, :Writer, owl:Thing ; :knows :bob . :bob a owl:Thing, foaf:Person ; :lives :rome .
:cid a foaf:Person ; :knows :ann . :rome a :City . :oslo a :City . :dee a :Writer, [] ; :lives :rome .
:eve :knows :rex . :rex a schema:Person . :rome :near :milan . :milan a :City .
"""


def test_types_from_triples(tmp_path):
    """ann is a foaf:Person, of which there are three, and no Writer; oslo and the classes have no triples."""
    path = write(tmp_path / "t.ttl", TYPED)
    _, reading = read(path, types_from="rdf:type")
    types, type_of = reading.types
    assert {name: types[place] for name, place in zip(reading.triples.entities, type_of.tolist())} == {
        **dict.fromkeys((":ann", ":bob", ":cid"), "foaf_Person"),
        **dict.fromkeys((":milan", ":rome"), "City"),
        ":dee": "Writer", ":eve": "untyped", ":rex": "schema_Person",
    }  # fmt: skip
    rows = ":ann :knows :bob/:bob :lives :rome/:cid :knows :ann/:dee :lives :rome/:eve :knows :rex/"
    assert sorted(names(reading)) == [tuple(row.split()) for row in f"{rows}:rome :near :milan".split("/")]
    classes = reading.figures["types"]["classes"]
    assert classes["foaf_Person"] == "foaf:Person" and classes["City"] == ":City"
    # With two partitions a type needs two entities; with max_types=1 only the largest stays.
    for options, expected in (({"num_parts": 2}, ["City", "Person"]), ({"max_types": 1}, ["Person"])):
        _, reading = read(path, types_from="http://www.w3.org/1999/02/22-rdf-syntax-ns#type", **options)
        assert [name for name in reading.types[0] if name != "untyped"] == expected
    # Names of types.
    classes = ["http://a.org/x#Big City", "relation", "untyped", "ex:a__b", "ex:", "http://a.org/Été"]
    assert type_names(classes) == ["Big_City", "relation-2", "untyped-2", "a_b", "ex", "t"]
    assert type_names(["a:X", "b:X", "a/X"]) == ["a_X", "b_X", "a_X-2"]


def test_errors_and_without_pyoxigraph(tmp_path, monkeypatch):
    table, and_not = "a\tb\tc\n", ", and the input is"
    for name, text, options, message in (
        ("t.nt", NT + f"<{EX}a> <{EX}b> .\n", {}, "t.nt:4: column .*: The object of a triple must be"),
        ("t.nt.gz", NT + "oops\n", {}, "t.nt.gz:4: .*read as N-Triples"),
        ("t.nt", TURTLE, {}, "t.nt:1: .*it looks like Turtle: --format turtle"),
        ("t.ttl", "@prefix e: <http://e.org/> .\n\ne:a e:p exx:b .", {}, "t.ttl:3: .*prefix exx: has not be"),
        ("t.ttl", "<a> <p> <b> .", {}, "t.ttl:1: .*; relative IRIs need --base-iri"),
        ("t.ttl", "# nothing\n", {}, "t.ttl: there are no triples"),
        ("t.ttl", "", {}, "t.ttl: there are no triples|the file is empty"),
        ("t.nt", f'<{EX}a> <{EX}p> "x" .\n', {}, "t.nt: all 1 objects are literals; see --literals entiti"),
        ("t.nt", NT, {"types_from": "rdf:type"}, "unknown relation of --types-from 'rdf:type'"),
        ("t.nt", NT, {"format": "ntriple"}, "unknown format 'ntriple'; did you mean 'ntriples'"),
        ("t.nt", NT, {"format": "openke"}, "--format openke is for a folder, got the file"),
        ("t.nt", NT, {"relation_attribute": "x"}, "--relation-attribute is for GraphML .*, and the input is"),
        ("t.tsv", table, {"full_iris": True}, f"--full-iris is for RDF{and_not} tab-separated text"),
        ("t.tsv", table, {"prefixes": {"a": "b:"}}, f"--prefix is for RDF{and_not} tab-separated text"),
        ("t.nt", NT, {"prefixes": {"a b": EX}}, "the prefix 'a b' is not allowed"),
        ("t.nt", NT, {"literals": "keep"}, "unknown policy for literals 'keep'"),
        ("t.nt", NQ, {}, "t.nt:1: .*it looks like N-Quads: --format nquads"),
        ("t.nt", NT, {"prefixes": {"a": "here"}}, "the IRI of prefix 'a' is 'here', expected an absolute"),
    ):
        path = write(tmp_path / name, text)
        with pytest.raises(InputError, match=message):
            partition_triples([path], tmp_path / "out", Options(reading=ReadingOptions(**options)))
        assert [entry.name for entry in tmp_path.iterdir()] == [name]
        path.unlink()
    path = tmp_path / "t.nt.gz"
    path.write_bytes(gzip.compress(NT.encode() * 1000)[:-30])
    with pytest.raises(InputError, match="t.nt.gz: cannot be read: Compressed file ended before"):
        read(path)
    monkeypatch.setitem(sys.modules, "pyoxigraph", None)
    with pytest.raises(InputError, match=r"^reading RDF needs pyoxigraph: pip install 'dglkge\[rdf\]' \("):
        read(path)


def test_several_files_and_folders(tmp_path):
    for name, text in (("train.nt", NT), ("test.ttl", TURTLE), ("notes.md", "")):
        write(tmp_path / name, text)
    source, reading = read(tmp_path, prefixes={"ex": EX})
    assert source.line == "input: train.nt, test.ttl: N-Triples and Turtle (by name)"
    assert (len(names(reading)), len(names(reading, "test"))) == (2, 5)
    (tmp_path / "other").mkdir()
    for name in ("a.nt", "b.nt"):
        write(tmp_path / "other" / name, NT)
    with pytest.raises(InputError, match="other has 2 files of N-Triples, none called train; --split 0.9"):
        read(tmp_path / "other")
    _, reading = read(tmp_path / "other", split=(0.9, 0.05, 0.05))
    assert len(names(reading)) == 4
    with pytest.raises(InputError, match="these files do not go together: t.tsv .tab-separated text., a.nt"):
        read([write(tmp_path / "t.tsv", "a\tb\tc\n"), tmp_path / "other" / "a.nt"])


# Few characters, so that IRIs begin with one another and schemes are prefixes.
IRI_STEMS = st.text("ab:/#", max_size=4).map(lambda text: "a:" + text)
PREFIX_NAMES = st.text("ab", max_size=2)
TABLES = st.dictionaries(PREFIX_NAMES, IRI_STEMS, max_size=5)


@given(TABLES, TABLES, st.lists(IRI_STEMS, max_size=20))
def test_expand_undoes_shorten(first, second, iris):
    table = PrefixTable(first, second)
    short = {iri: table.shorten(iri) for iri in iris}
    assert all(table.expand(name) == iri for iri, name in short.items())
    assert len(set(short.values())) == len(short)
    # The prefixes that were used are enough to undo it.
    used = PrefixTable(table.used)
    assert all(used.expand(name) == iri for iri, name in short.items())
    # The longest IRI wins.
    prefixes = {stem: prefix for prefix, stem in table.iris.items()}
    for iri, name in short.items():
        stem = max((stem for stem in prefixes if iri.startswith(stem)), key=len, default=None)
        assert name in ((iri, f"<{iri}>") if stem is None else (f"{prefixes[stem]}:{iri[len(stem) :]}",))


def test_earlier_tables_win_and_prefixes_are_parsed():
    table = PrefixTable({"foaf": "http://mine.org/"}, WELL_KNOWN, {"x": WELL_KNOWN["skos"]})
    assert table.shorten("http://mine.org/a") == "foaf:a"
    assert table.shorten(WELL_KNOWN["foaf"] + "name") == WELL_KNOWN["foaf"] + "name"
    assert table.shorten(WELL_KNOWN["skos"] + "broader") == "skos:broader"
    assert table.shorten("http://purl.obolibrary.org/obo/GO_0008150") == "go:0008150"
    assert table.shorten("geo:48.2,16.3") == "<geo:48.2,16.3>"
    assert len(set(WELL_KNOWN.values())) == len(WELL_KNOWN)
    prefixes = parse_prefixes(["ex=http://e.org/", "y:=http://y.org/?a=b", "=http://z.org/"])
    assert prefixes == {"ex": "http://e.org/", "y": "http://y.org/?a=b", "": "http://z.org/"}
    with pytest.raises(InputError, match="--prefix 'ex' is not allowed; give name=IRI"):
        parse_prefixes(["ex"])
    with pytest.raises(InputError, match="--prefix 'ex' is given twice: a: and b:"):
        parse_prefixes(["ex=a:", "ex=b:"])
