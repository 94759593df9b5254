"""Files of triples by name, against looking up one name at a time."""

from __future__ import annotations

import gzip

import numpy as np
import pandas as pd
import pytest

from dglkge.data.named_triples import read_named_triples
from dglkge.data.text_format import parse_columns
from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.errors import InputError
from dglkge.typing import Relation

NAMES = {
    "person": Vocabulary([f"p{i}" for i in range(9)], "entity"),
    "town": Vocabulary([f"t{i}" for i in range(5)] + ["p3"], "entity"),
}
ROWS = "knows person person,near person town,near town town,unused town person"
RELATIONS = RelationVocabulary([Relation(*row.split()) for row in ROWS.split(",")])


def read(path, **options):
    return read_named_triples(path, RELATIONS, NAMES.__getitem__, **options)


def some_lines(num_lines: int) -> tuple[list[tuple[str, str, str]], list[list[int]]]:
    random = np.random.default_rng(0)
    names, ids = [], []
    for _ in range(num_lines):
        relation = int(random.integers(3))
        lhs, rhs = RELATIONS[relation].lhs, RELATIONS[relation].rhs
        # p3 is the name of a person and of a town, so with "near" it would be ambiguous
        head = int(random.choice([i for i, name in enumerate(NAMES[lhs].names) if name != "p3"]))
        tail = int(random.integers(len(NAMES[rhs])))
        names.append((NAMES[lhs][head], RELATIONS[relation].name, NAMES[rhs][tail]))
        ids.append([head, relation, tail])
    return names, ids


def test_names_are_looked_up(tmp_path):
    names, ids = some_lines(200)
    path = tmp_path / "mine.txt.gz"
    path.write_bytes(gzip.compress("".join("\t".join(row) + "\n" for row in names).encode()))
    triples = read(path)
    assert triples.dtype == np.int64 and triples.tolist() == ids


def test_labels_columns_and_delimiter(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("near (person → town);t1;p4;0.5\nknows;p2;p3;1\n", encoding="utf-8")
    columns = parse_columns("relation,tail,head,weight")
    assert read(path, columns=columns, delimiter=";").tolist() == [[4, 1, 1], [3, 0, 2]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("p1\tknow\tp2", "unknown relation 'know'; did you mean 'knows'"),
        ("p1\tknows\tp99", "unknown entity 'p99'"),
        ("p1\tnear\tp1", "'near' joins several pairs of entity types, and not exactly one of them has"),
        ("p3\tnear\tt1", "has 'p3' and 't1'; known: 'near (person → town)', 'near (town → town)'"),
        ("p1\tknows", "got 2 columns separated by tabs, expected 3"),
    ],
)
def test_first_bad_line_is_named(tmp_path, line, words):
    text = "p1\tknows\tp2\n\n\r\np0\tknows\tp1\n" + line + "\nnobody\tknows\tp2\n"
    for name, pack in (("mine.tsv", bytes), ("mine.tsv.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(text.encode()))
        with pytest.raises(InputError) as caught:
            read(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}:5: ") and words in str(caught.value)


def test_headers_and_blocks_count(tmp_path):
    rows = [f"p{i % 9},knows,p{(i + 1) % 9}" for i in range(50)]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(["head,relation,tail", *rows, "p1,knows,?"]))
    with pytest.raises(InputError, match=r"mine.csv:52: unknown entity '\?'"):
        read(path)
    frame = pd.DataFrame([*some_lines(5)[0], ("p1", "knows", "x")], columns=["head", "relation", "tail"])
    frame.to_parquet(tmp_path / "mine.parquet")
    with pytest.raises(InputError, match="mine.parquet: row 6: unknown entity 'x'"):
        read(tmp_path / "mine.parquet")
