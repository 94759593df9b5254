"""Header lines: of text with and without quotes, of Parquet; a triple of such words is none."""

from __future__ import annotations

import pandas as pd
import pytest

from dglkge.data.text_format import Columns, RowRules, parse_columns
from dglkge.data.triples import header_of, read_chunks
from dglkge.errors import InputError

TRIPLES = [("Alice", "likes", "Bob"), ("Bob", "knows", "Carol")]


def write(path, lines, separator="\t"):
    path.write_text("".join(separator.join(fields) + "\n" for fields in lines))
    return path


def read(path, columns: str = "head,relation,tail", **options) -> list[tuple[str, ...]]:
    chunks = list(read_chunks(path, parse_columns(columns), **options))
    return [tuple(row) for chunk in chunks for row in chunk.astype(str).itertuples(index=False)]


@pytest.mark.parametrize(
    "header",
    [
        ("head", "relation", "tail"),
        ("Subject", "Predicate", "Object"),
        ("h", "r", "t"),
        ("s", "p", "o"),
        ("source", "label", "target"),
    ],
)
@pytest.mark.parametrize(("name", "separator"), [("t.tsv", "\t"), ("t.txt", "\t"), ("t.csv", ",")])
def test_a_header_is_seen_and_said(header, name, separator, tmp_path):
    path = write(tmp_path / name, [header, *TRIPLES], separator)
    assert read(path) == TRIPLES
    roles = header_of(path, Columns(), None, name[2:])
    assert roles == dict(zip(("head", "relation", "tail"), header))


def test_columns_of_a_header_may_have_any_order_and_company(tmp_path):
    rows = [("weight", "tail", "head", "relation"), ("0.5", "Bob", "Alice", "likes")]
    path = write(tmp_path / "t.tsv", rows)
    assert read(path) == TRIPLES[:1]
    assert read(path, "hrtw") == [("Alice", "likes", "Bob", "0.5")]


@pytest.mark.parametrize(
    "lines",
    [
        [("head", "relation", "tail"), ("neck", "relation", "tail")],  # the relation stands again
        [("subject", "predicate", "object")],  # nothing follows
        [("head", "is_part_of", "tail"), ("a", "b", "c")],
    ],
)
def test_words_that_are_a_triple_of_a_text_without_quotes(lines, tmp_path):
    path = write(tmp_path / "t.tsv", lines)
    assert read(path) == lines and header_of(path, Columns(), None, "tsv") == {}


def test_ids_under_a_header(tmp_path):
    path = write(tmp_path / "t.tsv", [("h", "r", "t"), ("3", "0", "4")])
    rules = RowRules({"head": 5, "relation": 1, "tail": 5})
    assert read(path, rules=rules) == [("3", "0", "4")]
    write(path, [("h", "r", "t"), ("3", "0", "5")])
    with pytest.raises(InputError, match=r"t.tsv:2: the tail id is 5, allowed is 0 to 4"):
        read(path, rules=rules)


def test_columns_of_parquet(tmp_path):
    frame = pd.DataFrame(TRIPLES, columns=["Subject", "predicate", "object"]).assign(more=1)
    frame.to_parquet(tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet") == TRIPLES
    frame.rename(columns={"object": "thing"}).to_parquet(tmp_path / "u.parquet")
    with pytest.raises(
        InputError, match="u.parquet: no column 'head'; the file has Subject, predicate, thing"
    ):
        read(tmp_path / "u.parquet")
