"""Tables of triples: the columns option, headers, kinds of files, names that must survive, exact lines."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dglkge.data.named_triples import read_named_triples
from dglkge.data.text_format import Columns, RowRules, extension, parse_columns, parse_delimiter
from dglkge.data.triples import CHUNK_ROWS, TripleFile, frame_chunks
from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.errors import InputError
from dglkge.typing import Relation

NAMES = ["NA", "null", "1e5", '"x', " spaced ", "#", "'", "nan", "Ōsaka", "1", "True", "\\N", "a,b"]
AWKWARD = [(NAMES[i], NAMES[(i + 5) % len(NAMES)], NAMES[(i + 7) % len(NAMES)]) for i in range(len(NAMES))]
ROLES = ["head", "relation", "tail"]
TRIPLES = [("Alice", "likes", "Bob"), ("Bob", "knows", "Carol")]
IDS = RowRules({"head": 5, "relation": 3, "tail": 5})


@pytest.fixture
def small_block(monkeypatch):
    monkeypatch.setattr("dglkge.data.triples.BLOCK_BYTES", 200)


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def joined(rows: list[tuple], separator: str = "\t", end: str = "\n") -> str:
    return "".join(separator.join(row) + end for row in rows)


def read(path: Path, columns: str = "hrt", **options: Any) -> list[tuple]:
    frames = list(TripleFile(path, parse_columns(columns), **options).frames())
    roles = [role for role in (*ROLES, "weight") if role in frames[0]]
    return [row for frame in frames for row in frame[roles].itertuples(index=False, name=None)]


def rows_of_frame(frame: pd.DataFrame, rules: RowRules | None = None) -> list[tuple]:
    chunks = frame_chunks(frame, Columns(), rules or RowRules(), "train")
    return [row for chunk in chunks for row in zip(*(chunk[role].to_pylist() for role in ROLES))]


def test_extensions_and_delimiters():
    names = ["a.tsv", "a.TSV.GZ", "a.b.csv.gz", "a.parquet", "a", "a.gz"]
    assert [extension(Path(name)) for name in names] == [".tsv", ".tsv", ".csv", ".parquet", "", ""]
    texts = ["tab", "\\t", "comma", "space", "|", "\t"]
    assert [parse_delimiter(text) for text in texts] == ["\t", "\t", ",", " ", "|", "\t"]
    for text in ("", "||", '"', "\n", "→", "tabs"):
        with pytest.raises(InputError, match="give one ASCII character, or tab, comma, space"):
            parse_delimiter(text)


def test_columns_by_role_and_by_name():
    """Roles in the order of the columns; pairs; bare names of head, relation, tail and weight."""
    for text, order in (
        ("tail, head ,relation", "tail head relation"),
        ("htr", "head tail relation"),
        ("wtrh", "weight tail relation head"),
    ):
        columns = parse_columns(text)
        assert columns == Columns(tuple(order.split()))
        assert columns.names_or_roles == {role: role for role in order.split()}
    for text, roles, names in (
        ("tail=o, head=s,relation=a=b,weight=score", "tail head relation weight", "o s a=b score"),
        ("s,p,o,conf", "head relation tail weight", "s p o conf"),
        ("head,rel,tail", "head relation tail", "head rel tail"),
    ):
        columns = parse_columns(text)
        assert columns == Columns(tuple(roles.split()), dict(zip(roles.split(), names.split())))
        assert columns.names_or_roles is columns.names


def test_columns_that_give_no_triple_are_refused():
    texts = "hr hrtt head,relation head,head,tail head,relation,tail,tail s,p a,b,c,d,e head=s,relation=p"
    texts += " head=s,relation=p,tail=o,head=q head=s,relation=p,tail=s head=s,relation=p,tail="
    for text in ("", *texts.split(), "head=s,p,o", "s,,o"):
        with pytest.raises(InputError, match="allowed are roles in the order of the columns") as caught:
            parse_columns(text)
        assert repr(text) in str(caught.value)


def test_a_header_is_seen_and_said(tmp_path):
    for name, first, is_header in (
        ("t.tsv", ("head", "relation", "tail"), True),
        ("t.csv", ("h", "r", "t"), True),
        ("t.csv", (":START_ID", ":TYPE", ":END_ID"), True),
        ("t.tsv", ("head", "is_part_of", "tail"), False),  # no words of a header
    ):
        separator = "," if name == "t.csv" else "\t"
        path = write(tmp_path / name, joined([first, *TRIPLES], separator))
        assert read(path) == (TRIPLES if is_header else [first, *TRIPLES])
        assert TripleFile(path).header == (dict(zip(ROLES, first)) if is_header else {})
    empty = (tmp_path / "t.csv").write_text("\n\nh,r,t\n\na,r,b\n")
    assert empty and read(tmp_path / "t.csv") == [("a", "r", "b")]
    (tmp_path / "t.tsv").write_text("\r\nhead\trelation\ttail\r\n\r\na\tr\tb\r\n")
    assert read(tmp_path / "t.tsv") == [("a", "r", "b")]
    # Words that are a triple of a text without quotes: the relation stands again, or nothing follows.
    for rows in ([tuple(ROLES), ("neck", "relation", "tail")], [("subject", "predicate", "object")]):
        path = write(tmp_path / "t.tsv", joined(rows))
        assert read(path) == rows and TripleFile(path).header == {}


def test_awkward_names_survive(tmp_path):
    for name, end in (("t.tsv", "\n"), ("t.txt", "\r\n"), ("t.tsv.gz", "\r\n")):
        assert read(write(tmp_path / name, joined(AWKWARD, end=end))) == AWKWARD
    members = [gzip.compress(joined(rows).encode()) for rows in (AWKWARD[:5], AWKWARD[5:])]
    (tmp_path / "members.tsv.gz").write_bytes(b"".join(members))
    assert read(tmp_path / "members.tsv.gz") == AWKWARD
    assert str(next(TripleFile(tmp_path / "t.tsv").frames())["head"].dtype) == "category"
    frame = pd.DataFrame(AWKWARD, columns=ROLES)
    for name in ("t.csv", "t.csv.gz"):
        assert read(write(tmp_path / name, frame.to_csv(index=False, header=False))) == AWKWARD
    frame.to_parquet(tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet") == rows_of_frame(frame) == AWKWARD


ANY_NAME = st.text(st.characters(exclude_characters="\t\n\r", codec="utf-8"), min_size=1)


@given(
    rows=st.lists(st.tuples(ANY_NAME, ANY_NAME, ANY_NAME), min_size=1, max_size=5).filter(
        lambda rows: not rows[0][0].startswith("\ufeff")
    )
)
def test_any_names_survive(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("t") / "t.tsv"
    assert read(write(path, joined([("a", "b", "c"), *rows]))) == [("a", "b", "c"), *rows]


def test_order_of_columns_delimiters_and_ids(tmp_path):
    for name, text, columns, options, row in (
        ("t.tsv", "r\th\tt", "rht", {}, ("h", "r", "t")),
        ("t.tsv", "0.5\ta\tb\tc\n", "wrht", {}, ("b", "a", "c", 0.5)),
        ("t.txt", "a b c\n", "hrt", {"delimiter": " "}, ("a", "b", "c")),
        ("t.csv", '"a;x";b;c\n', "hrt", {"delimiter": ";"}, ("a;x", "b", "c")),
        ("t.tsv", "id\to\ts\tp\n1\tx\ty\tz\n", "s,p,o", {}, ("y", "z", "x")),
        ("t.csv", "tail,extra,head,relation\nt,x,h,r\n", "hrt", {}, ("h", "r", "t")),
        ("t.csv", "from,to,type,label\nh,t,x,r\n", "hrt", {}, ("h", "r", "t")),
        ("t.tsv", "weight\ttail\thead\trelation\n0.5\tt\th\tr\n", "hrtw", {}, ("h", "r", "t", 0.5)),
        ("t.tsv", "h\tr\tt\n3\t2\t4\n", "hrt", {"rules": IDS}, (3, 2, 4)),
        ("t.d", "7\na b c\n", "hrt", {"delimiter": " ", "kind": "tsv", "skip_first": True}, ("a", "b", "c")),
    ):
        assert read(write(tmp_path / name, text), columns, **options) == [row]


def test_parquet_and_frames(tmp_path):
    """Of several chunks; columns by the words of headers; integers are names where names are asked for."""
    num_rows = CHUNK_ROWS + 10
    frame = pd.DataFrame({"head": np.arange(num_rows) % 5, "relation": 0, "tail": np.arange(num_rows) % 3})
    frame.to_parquet(tmp_path / "t.parquet")
    expected = list(frame.itertuples(index=False, name=None))
    assert read(tmp_path / "t.parquet", rules=IDS) == expected == rows_of_frame(frame, IDS)
    assert rows_of_frame(frame[:1]) == [("0", "0", "0")]
    named = pd.DataFrame(TRIPLES, columns=["Subject", "predicate", "object"]).assign(more=1)
    named.to_parquet(tmp_path / "u.parquet")
    assert read(tmp_path / "u.parquet") == TRIPLES


def test_bad_line_is_found_in_any_block(tmp_path, small_block):
    for bad, fault, num_good, name in (
        (b"a,b", "got 2 columns", 0, "t.tsv"),
        (b"a,b,c,d", "got 4 columns", 300, "t.csv"),
        (b"a,b,c,d", "got 4 columns", 1, "t.tsv.gz"),
        (b"a,\xff,c", "byte 3 of the line is not UTF-8", 300, "t.tsv"),
        (b"a,,c", "the relation is empty", 300, "t.tsv.gz"),
    ):
        lines = [b"aaa,bb%d,c" % i for i in range(num_good)] + [b"", bad] + [b"x,y,z"] * 50
        content = b"\n".join(lines)
        path = write(tmp_path / name, content if "csv" in name else content.replace(b",", b"\t"))
        with pytest.raises(InputError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}:{num_good + 2}: ") and fault in str(caught.value)


def test_bad_fields(tmp_path):
    for columns, bad, fault in (
        ("hrtw", "a\tb\tc\tnan", "the weight is nan, expected a finite number of 0 or more"),
        ("hrtw", "a\tb\tc\tx", "the weight is 'x', expected a number"),
        ("hrt", "a\rx\tb\tc", "there is a carriage return inside the line"),
        ("hrt", "a b c", "got 1 columns separated by tabs, expected 3: 'a b c'; see --delimiter"),
        ("ids", "1\t1\t²", "the tail is '²', expected an integer id"),
        ("ids", "0\t0\t7", "the tail id is 7, allowed is 0 to 4"),
        ("ids", "1\t0\t" + "1" * 5000, "the tail id is 111"),
        ("ids", "1\t1\t-2", "the tail id is -2, allowed is 0 to 4"),
    ):
        good = {"hrtw": "a\tb\tc\t1e-3\n", "hrt": "a\tb\tc\n", "ids": "0\t0\t1\n"}[columns]
        path = write(tmp_path / "t.tsv", f"{good}\r\n\n{good}{bad}\n{good}")
        with pytest.raises(InputError) as caught:
            read(path, "hrt", rules=IDS) if columns == "ids" else read(path, columns)
        assert str(caught.value).startswith(f"{path}:5: ") and fault in str(caught.value)


ZIPPED = gzip.compress("".join(f"a{i}\tb{i * i}\tc\n" for i in range(999)).encode())


def test_unreadable_files(tmp_path, small_block):
    for name, content, columns, message in (
        ("t.tsv", None, "hrt", "there is no such file"),
        ("t.tsv", b"\n\n", "hrt", "the file is empty: it has no triples"),
        ("t.json", b"{}", "hrt", "unknown kind of file; known are .tsv, .txt, .csv, .parquet"),
        ("t.parquet", b"PAR1 or not", "hrt", "cannot be read as Parquet"),
        ("t.csv", b'"a,b,c\n', "hrt", "t.csv:1: bad quotes"),
        ("t.tsv.gz", ZIPPED[:-20], "hrt", "cannot be read"),
        ("t.tsv.gz", b"a\tb\tc\n", "hrt", "cannot be read: Not a gzipped file"),
        ("t.csv", b"s,p,p\n1,2,3\n", "o,s,p", "t.csv:1: no column 'o'; the header has s, p, p"),
        ("t.csv", b"s,p,p\n1,2,3\n", "head=s,relation=p,tail=x", "more than one column 'p'"),
        ("t.tsv", b"a" * 1000 + b"\tb\tc\n", "hrt", "t.tsv: cannot be read: .*block"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            read(path, columns)
        assert str(path) in str(caught.value)


def test_bad_row_of_a_frame_is_numbered(tmp_path):
    for column, value, message in (
        ("head", None, "the head is empty"),
        ("tail", "", "the tail is empty"),
        ("weight", -1.0, "the weight is -1.0"),
        ("weight", float("nan"), "the weight is"),
    ):
        frame = pd.DataFrame([("a", "r", "b", 1.0)] * 4, columns=[*ROLES, "weight"])
        frame.loc[2, column] = value
        with pytest.raises(InputError, match=f"valid: row 3: {message}"):
            list(frame_chunks(frame, parse_columns("hrtw"), RowRules(), "valid"))
        frame.to_parquet(tmp_path / "t.parquet")
        with pytest.raises(InputError, match=f"t.parquet: row 3: {message}"):
            read(tmp_path / "t.parquet", "hrtw")


def test_unusable_frames(tmp_path):
    for frame, rules, message in (
        ({"head": [], "relation": [], "tail": []}, None, "the data frame is empty"),
        ({"head": ["a"], "relation": ["b"]}, None, "no column 'tail'; there are head, relation"),
        ({"head": [0.5], "relation": ["b"], "tail": ["c"]}, None, "head column holds double"),
        ({"head": ["x", 1], "relation": "b", "tail": "c"}, None, "mixes several types"),
        ({"head": pd.Series(["\ud800"], dtype=object), "relation": "b", "tail": "c"}, None, "or is not text"),
        ({"head": [0, 9], "relation": 0, "tail": 1}, IDS, "row 2: the head id is 9, allowed is 0 to 4"),
    ):
        with pytest.raises(InputError, match=f"train: .*{message}"):
            rows_of_frame(pd.DataFrame(frame), rules)
        if "no column" in message:
            pd.DataFrame(frame).to_parquet(tmp_path / "t.parquet")
            with pytest.raises(InputError, match="t.parquet: no column 'tail'; the file has head, relation"):
                read(tmp_path / "t.parquet")


VOCABULARIES = {
    "person": Vocabulary([f"p{i}" for i in range(9)], "entity"),
    "town": Vocabulary([f"t{i}" for i in range(5)] + ["p3"], "entity"),
}
ROWS = "knows person person,near person town,near town town,unused town person"
RELATIONS = RelationVocabulary([Relation(*row.split()) for row in ROWS.split(",")])


def read_names(path, **options):
    return read_named_triples(path, RELATIONS, VOCABULARIES.__getitem__, **options)


# p3 is the name of a person and of a town, so with "near" it would be ambiguous.
LINES = [("p1", "near", "t4"), ("t0", "near", "p3"), ("p8", "knows", "p3"), ("t2", "near", "t0")]


def test_names_are_looked_up(tmp_path):
    """Also with labels, another delimiter and columns in another order."""
    triples = read_names(write(tmp_path / "mine.txt.gz", joined(LINES * 50)))
    assert triples.dtype == np.int64
    assert triples.tolist() == [[1, 1, 4], [0, 2, 5], [8, 0, 3], [2, 2, 0]] * 50
    path = write(tmp_path / "mine.txt", "near (person → town);t1;p4;0.5\nknows;p2;p3;1\n")
    columns = parse_columns("relation,tail,head,weight")
    assert read_names(path, columns=columns, delimiter=";").tolist() == [[4, 1, 1], [3, 0, 2]]


def test_first_bad_line_is_named(tmp_path):
    for line, words in (
        ("p1\tknow\tp2", "unknown relation 'know'; did you mean 'knows'"),
        ("p1\tknows\tp99", "unknown entity 'p99'"),
        ("p1\tnear\tp1", "'near' joins several pairs of entity types, and not exactly one of them has"),
        ("p3\tnear\tt1", "has 'p3' and 't1'; known: 'near (person → town)', 'near (town → town)'"),
        ("p1\tknows", "got 2 columns separated by tabs, expected 3"),
    ):
        text = "p1\tknows\tp2\n\n\r\np0\tknows\tp1\n" + line + "\nnobody\tknows\tp2\n"
        for name in ("mine.tsv", "mine.tsv.gz"):
            with pytest.raises(InputError) as caught:
                read_names(write(tmp_path / name, text))
            assert str(caught.value).startswith(f"{tmp_path / name}:5: ") and words in str(caught.value)
    # Headers and blocks count.
    rows = [f"p{i % 9},knows,p{(i + 1) % 9}" for i in range(50)]
    path = write(tmp_path / "mine.csv", "\n".join(["head,relation,tail", *rows, "p1,knows,?"]))
    with pytest.raises(InputError, match=r"mine.csv:52: unknown entity '\?'"):
        read_names(path)
    frame = pd.DataFrame([*LINES, LINES[0], ("p1", "knows", "x")], columns=ROLES)
    frame.to_parquet(tmp_path / "mine.parquet")
    with pytest.raises(InputError, match="mine.parquet: row 6: unknown entity 'x'"):
        read_names(tmp_path / "mine.parquet")


def test_a_row_that_a_lone_carriage_return_ends_is_named_by_its_number(tmp_path):
    """Arrow ends lines there; no line of the file has the row."""
    (tmp_path / "old.tsv").write_bytes(b"p1\tknows\tp2\rp0\tknows\tp1\rp1\tknows\tp99\r")
    with pytest.raises(InputError, match=r"old\.tsv: row 3: unknown entity 'p99'"):
        read_names(tmp_path / "old.tsv")
