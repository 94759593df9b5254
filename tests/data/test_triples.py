"""Reading triples in chunks: every kind of file, names that must survive, and exact line numbers."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.data.text_format import Columns, RowRules, parse_columns
from dglkge.data.triples import CHUNK_ROWS, frame_chunks, read_chunks
from dglkge.errors import InputError

NAMES = ["NA", "null", "1e5", '"x', " spaced ", "#", "'", "nan", "Ōsaka", "1", "True", "\\N", "a,b"]
SMALL_BLOCK = 200


def frames_of(chunks) -> list[pd.DataFrame]:
    """Chunks of Arrow's arrays as data frames."""
    return [pd.DataFrame({role: array.to_pandas() for role, array in chunk.items()}) for chunk in chunks]


def rows_of(chunks) -> list[tuple]:
    """All rows of all chunks, as tuples in the order of head, relation, tail, weight."""
    frames = list(chunks)
    roles = [role for role in ("head", "relation", "tail", "weight") if role in frames[0]]
    return [row for frame in frames for row in frame[roles].itertuples(index=False, name=None)]


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


AWKWARD = [(NAMES[i], NAMES[(i + 5) % len(NAMES)], NAMES[(i + 7) % len(NAMES)]) for i in range(len(NAMES))]


def test_awkward_names_survive(tmp_path):
    for name, end in (("t.tsv", "\n"), ("t.txt", "\r\n"), ("t.tsv.gz", "\r\n")):
        path = write(tmp_path / name, "".join("\t".join(row) + end for row in AWKWARD))
        assert rows_of(read_chunks(path)) == AWKWARD
    frame = pd.DataFrame(AWKWARD, columns=["head", "relation", "tail"])
    for name in ("t.csv", "t.csv.gz"):
        path = write(tmp_path / name, frame.to_csv(index=False, header=False))
        assert rows_of(read_chunks(path)) == AWKWARD
    frame.to_parquet(tmp_path / "t.parquet")
    assert rows_of(read_chunks(tmp_path / "t.parquet")) == AWKWARD
    assert rows_of(frames_of(frame_chunks(frame, Columns(), RowRules(), "train"))) == AWKWARD


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(
        st.tuples(*[st.text(st.characters(exclude_characters="\t\n\r", codec="utf-8"), min_size=1)] * 3),
        min_size=1,
    ).filter(lambda rows: not rows[0][0].startswith("\ufeff"))
)
def test_any_names_survive(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("t") / "t.tsv"
    write(path, "".join("\t".join(row) + "\n" for row in rows))
    assert rows_of(read_chunks(path)) == rows


def test_chunks_are_of_categories_and_progress_reaches_the_end(tmp_path):
    path = write(tmp_path / "t.tsv", "".join(f"e{i % 7}\tr\te{i % 5}\n" for i in range(500)))
    seen: list[int] = []
    chunks = list(read_chunks(path, on_bytes=seen.append, block_bytes=SMALL_BLOCK))
    assert len(chunks) > 10 and sum(len(chunk) for chunk in chunks) == 500
    assert all(str(chunk["head"].dtype) == "category" for chunk in chunks)
    assert seen == sorted(seen) and seen[-1] == path.stat().st_size


def test_order_of_columns_and_delimiters(tmp_path):
    path = tmp_path / "t.tsv"
    for columns, line in (("htr", "h\tt\tr"), ("tail,relation,head", "t\tr\th"), ("rht", "r\th\tt")):
        assert rows_of(read_chunks(write(path, line), parse_columns(columns))) == [("h", "r", "t")]
    (chunk,) = read_chunks(write(path, "0.5\ta\tb\tc\n2\ta\tb\td\n"), parse_columns("wrht"))
    assert chunk["weight"].dtype == np.float32 and chunk["weight"].tolist() == [0.5, 2]
    assert chunk["relation"].tolist() == ["a", "a"]
    assert rows_of(read_chunks(write(tmp_path / "t.txt", "a b c\n"), delimiter=" ")) == [("a", "b", "c")]
    semicolons = write(tmp_path / "t.csv", '"a;x";b;c\n')
    assert rows_of(read_chunks(semicolons, delimiter=";")) == [("a;x", "b", "c")]


def test_named_columns_are_found_and_others_not_read(tmp_path):
    text = "id\tobject\tsubject\tp\n1\to\ts\tp1\n"
    columns = parse_columns("subject,p,object")
    assert rows_of(read_chunks(write(tmp_path / "t.tsv", text), columns)) == [("s", "p1", "o")]


def test_csv_with_roles_as_names_has_a_header(tmp_path):
    text = "tail,extra,head,relation\nt,x,h,r\n"
    assert rows_of(read_chunks(write(tmp_path / "t.csv", text))) == [("h", "r", "t")]
    # in a file of tabs they are names like others
    path = write(tmp_path / "t.tsv", "tail\thead\trelation\n")
    assert rows_of(read_chunks(path)) == [("tail", "head", "relation")]


def test_integer_ids(tmp_path):
    rules = RowRules({"head": 10, "relation": 2, "tail": 10})
    (chunk,) = read_chunks(write(tmp_path / "t.tsv", "3\t1\t9\n"), rules=rules)
    assert chunk["tail"].dtype == np.int64 and chunk.iloc[0].tolist() == [3, 1, 9]


@pytest.mark.parametrize(
    "bad, fault, num_good, name",
    [
        (b"a,b", "got 2 columns", 0, "t.tsv"),
        (b"a,b", "got 2 columns", 300, "t.csv"),
        (b"a,b,c,d", "got 4 columns", 1, "t.csv"),
        (b"a,b,c,d", "got 4 columns", 300, "t.tsv.gz"),
        (b"a,\xff,c", "not UTF-8", 300, "t.tsv"),
        (b"a,\xff,c", "not UTF-8", 0, "t.csv"),
        (b"a,,c", "the relation is empty", 1, "t.tsv"),
        (b"a,,c", "the relation is empty", 300, "t.tsv.gz"),
    ],
)
def test_bad_line_is_found_in_any_block(tmp_path, bad, fault, num_good, name):
    lines = [b"aaa,bb%d,c" % i for i in range(num_good)] + [b"", bad] + [b"x,y,z"] * 50
    content = b"\n".join(lines)
    path = write(tmp_path / name, content if "csv" in name else content.replace(b",", b"\t"))
    with pytest.raises(InputError) as caught:
        list(read_chunks(path, block_bytes=SMALL_BLOCK))
    assert str(caught.value).startswith(f"{path}:{num_good + 2}: ") and fault in str(caught.value)


@pytest.mark.parametrize(
    "columns, bad, fault",
    [
        ("hrtw", "a\tb\tc\tnan", "the weight is nan, expected a finite number"),
        ("hrtw", "a\tb\tc\t-1", "the weight is -1, expected a finite number"),
        ("hrtw", "a\tb\tc\tx", "the weight is 'x'"),
        ("hrtw", "a\tb\tc\t", "the weight is"),
        ("hrt", "a\t\tc", "the relation is empty"),
        ("hrt", "a\rx\tb\tc", "there is a carriage return inside the line"),
        ("hrt", "a b c", "got 1 columns separated by tabs, expected 3: 'a b c'; see --delimiter"),
    ],
)
def test_bad_lines_of_names(tmp_path, columns, bad, fault):
    good = "a\tb\tc\t1e-3\n" if columns == "hrtw" else "a\tb\tc\n"
    path = write(tmp_path / "t.tsv", f"{good}\r\n\n{good}{bad}\n{good}")
    with pytest.raises(InputError) as caught:
        list(read_chunks(path, parse_columns(columns)))
    assert str(caught.value).startswith(f"{path}:5: ") and fault in str(caught.value)


@pytest.mark.parametrize(
    "bad, fault",
    [
        ("0\tx\t2", "the relation is 'x', expected an integer id"),
        ("1\t1\t2.0", "the tail is '2.0', expected an integer id"),
        ("1\t1\t²", "expected an integer id"),
        ("0\t0\t7", "the tail id is 7, allowed is 0 to 4"),
        ("1\t3\t2", "the relation id is 3, allowed is 0 to 2"),
        ("1\t1\t-2", "the tail id is -2, allowed is 0 to 4"),
    ],
)
def test_bad_lines_of_ids(tmp_path, bad, fault):
    path = write(tmp_path / "t.tsv", f"0\t0\t1\n{bad}\n")
    with pytest.raises(InputError) as caught:
        list(read_chunks(path, rules=RowRules({"head": 5, "relation": 3, "tail": 5})))
    assert str(caught.value).startswith(f"{path}:2: ") and fault in str(caught.value)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("t.tsv", b"", "the file is empty"),
        ("t.tsv", b"\n\n", "the file is empty"),
        ("t.csv", b"head,relation,tail\n", "the file is empty: it has no triples"),
        ("t.json", b"{}", "unknown kind of file; known are .tsv, .txt, .csv, .parquet"),
        ("t.parquet", b"PAR1 or not", "cannot be read as Parquet"),
        ("t.csv", b'"a,b,c\n', "t.csv:1: bad quotes"),
    ],
)
def test_unreadable_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        list(read_chunks(path))
    assert str(path) in str(caught.value)


def test_missing_cut_off_and_damaged_files(tmp_path):
    path = tmp_path / "t.tsv.gz"
    with pytest.raises(InputError, match="there is no such file"):
        list(read_chunks(path))
    content = gzip.compress("".join(f"a{i}\tb{i * i}\tc\n" for i in range(999)).encode())
    for damaged in (content[:-20], content[:30] + b"garbage" * 20, b"a\tb\tc\n"):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="cannot be read"):
            list(read_chunks(path))
    with pytest.raises(InputError, match="cannot be read: Not a gzipped file"):
        list(read_chunks(path))


def test_gz_of_several_members(tmp_path):
    path = tmp_path / "t.tsv.gz"
    path.write_bytes(gzip.compress(b"a\tb\tc\n") + gzip.compress(b"d\te\tf\n"))
    assert rows_of(read_chunks(path)) == [("a", "b", "c"), ("d", "e", "f")]


def test_missing_or_repeated_column(tmp_path):
    path = write(tmp_path / "t.csv", "s,p,p\n1,2,3\n")
    with pytest.raises(InputError, match=r"t.csv:1: no column 'o'; the header has s, p, p"):
        list(read_chunks(path, parse_columns("o,s,p")))
    with pytest.raises(InputError, match=r"more than one column 'p'"):
        list(read_chunks(path, parse_columns("head=s,relation=p,tail=x")))
    pd.DataFrame({"s": ["a"]}).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"t.parquet: no column 'head'; the file has s"):
        list(read_chunks(tmp_path / "t.parquet"))


def test_long_line_is_an_input_error(tmp_path):
    path = write(tmp_path / "t.tsv", "a" * 1000 + "\tb\tc\n")
    with pytest.raises(InputError, match="t.tsv: cannot be read: .*block"):
        list(read_chunks(path, block_bytes=SMALL_BLOCK))


def test_integers_are_names_where_names_are_asked_for():
    frame = pd.DataFrame({"head": [1, 2], "relation": ["r", "r"], "tail": [3, 4]})
    found = rows_of(frames_of(frame_chunks(frame, Columns(), RowRules(), "train")))
    assert found == [("1", "r", "3"), ("2", "r", "4")]


def test_frame_and_parquet_of_several_chunks(tmp_path):
    num_rows = CHUNK_ROWS + 10
    frame = pd.DataFrame({"head": np.arange(num_rows) % 5, "relation": 0, "tail": np.arange(num_rows) % 3})
    rules = RowRules({"head": 5, "relation": 1, "tail": 3})
    frame.to_parquet(tmp_path / "t.parquet")
    of_frame = frames_of(frame_chunks(frame, Columns(), rules, "train"))
    for chunks in (of_frame, read_chunks(tmp_path / "t.parquet", rules=rules)):
        found = pd.concat(list(chunks), ignore_index=True)
        assert np.array_equal(found.to_numpy(), frame.to_numpy())


@pytest.mark.parametrize(
    "row, message",
    [
        ({"head": None}, "the head is empty"),
        ({"tail": ""}, "the tail is empty"),
        ({"weight": -1.0}, "the weight is -1.0"),
        ({"weight": float("nan")}, "the weight is"),
    ],
)
def test_bad_row_of_a_frame_is_numbered(tmp_path, row, message):
    frame = pd.DataFrame({"head": ["a"] * 4, "relation": ["r"] * 4, "tail": ["b"] * 4, "weight": [1.0] * 4})
    for column, value in row.items():
        frame.loc[2, column] = value
    columns = parse_columns("head,relation,tail,weight")
    with pytest.raises(InputError, match=f"valid: row 3: {message}"):
        list(frame_chunks(frame, columns, RowRules(), "valid"))
    frame.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(InputError, match=f"t.parquet: row 3: {message}"):
        list(read_chunks(tmp_path / "t.parquet", columns))


@pytest.mark.parametrize(
    "frame, message",
    [
        (pd.DataFrame({"head": [], "relation": [], "tail": []}), "the data frame is empty"),
        (pd.DataFrame({"head": ["a"], "relation": ["b"]}), "no column 'tail'; there are head, relation"),
        (pd.DataFrame({"head": [0.5], "relation": ["b"], "tail": ["c"]}), "head column holds double"),
        (pd.DataFrame({"head": [["x"]], "relation": ["b"], "tail": ["c"]}), "head column holds list"),
        (pd.DataFrame({"head": ["x", 1], "relation": "b", "tail": "c"}, dtype=object), "mixes several types"),
    ],
)
def test_unusable_frames(frame, message):
    with pytest.raises(InputError, match=message):
        list(frame_chunks(frame, Columns(), RowRules(), "train"))


def test_frame_id_out_of_range_is_numbered():
    frame = pd.DataFrame({"head": [0, 9], "relation": [0, 0], "tail": [1, 1]})
    with pytest.raises(InputError, match="train: row 2: the head id is 9, allowed is 0 to 4"):
        list(frame_chunks(frame, Columns(), RowRules({"head": 5, "relation": 1, "tail": 5}), "train"))
