"""Kinds of files by name, delimiters, and the ``--columns`` option."""

from __future__ import annotations

from pathlib import Path

import pytest

from dglkge.data.text_format import (
    Columns,
    TextFormat,
    extension,
    parse_columns,
    parse_delimiter,
    text_format,
)
from dglkge.errors import InputError


def test_extension_is_that_below_gz():
    names = ["a.tsv", "a.TSV.GZ", "a.b.csv.gz", "a.parquet", "a", "a.gz"]
    assert [extension(Path(name)) for name in names] == [".tsv", ".tsv", ".csv", ".parquet", "", ""]


def test_only_csv_is_quoted():
    assert text_format(Path("a.csv.gz"), None) == TextFormat(",", quoted=True)
    assert text_format(Path("a.txt"), None) == TextFormat("\t", quoted=False)
    assert text_format(Path("a.csv"), ";") == TextFormat(";", quoted=True)
    assert text_format(Path("a.tsv"), "|") == TextFormat("|", quoted=False)


def test_split():
    assert TextFormat(",", True).split('"a,b",c,"d ""e"""') == ["a,b", "c", 'd "e"']
    assert TextFormat("\t", False).split('"a\tb"\t') == ['"a', 'b"', ""]
    with pytest.raises(ValueError, match="bad quotes"):
        TextFormat(",", True).split('a,"b')


def test_delimiter():
    given = ["tab", "\\t", "comma", "space", "|", "\t"]
    assert [parse_delimiter(text) for text in given] == ["\t", "\t", ",", " ", "|", "\t"]
    for text in ("", "||", '"', "\n", "→", "tabs"):
        with pytest.raises(InputError, match="give one ASCII character, or tab, comma, space"):
            parse_delimiter(text)


@pytest.mark.parametrize(
    "text, order",
    [
        ("head,relation,tail", "head relation tail"),
        ("tail, head ,relation", "tail head relation"),
        ("weight,head,relation,tail", "weight head relation tail"),
        ("htr", "head tail relation"),
        ("wtrh", "weight tail relation head"),
    ],
)
def test_roles_in_the_order_of_the_columns(text, order):
    columns = parse_columns(text)
    assert columns.order == tuple(order.split()) and columns.names == {}
    assert columns.names_or_roles == {role: role for role in order.split()}
    assert (columns == Columns()) == (text == "head,relation,tail")


def test_names_of_columns():
    """In pairs, or bare in the order of head, relation, tail and weight."""
    columns = parse_columns("tail=o, head=s,relation=a=b,weight=score")
    assert columns.names == {"tail": "o", "head": "s", "relation": "a=b", "weight": "score"}
    assert columns.names_or_roles is columns.names and "weight" in columns.order
    assert parse_columns("s,p,o,conf").names == {"head": "s", "relation": "p", "tail": "o", "weight": "conf"}
    assert parse_columns("head,rel,tail").names == {"head": "head", "relation": "rel", "tail": "tail"}


def test_what_gives_no_triple_is_refused():
    texts = "hr hrtt head,relation head,head,tail head,relation,tail,tail s,p a,b,c,d,e head=s,relation=p"
    texts += (
        " head=s,relation=p,tail=o,head=q head=s,relation=p,tail=s head=s,relation=p,tail= head=s,p,o s,,o"
    )
    for text in ("", *texts.split()):
        with pytest.raises(InputError, match="allowed are roles in the order of the columns") as caught:
            parse_columns(text)
        assert repr(text) in str(caught.value)
