"""Kinds of files by name, and delimiters."""

from __future__ import annotations

from pathlib import Path

import pytest

from dglkge.data.text_format import TextFormat, extension, parse_delimiter, text_format
from dglkge.errors import InputError


@pytest.mark.parametrize(
    "name, kind",
    [
        ("a.tsv", ".tsv"),
        ("a.TSV.GZ", ".tsv"),
        ("a.b.csv.gz", ".csv"),
        ("a.parquet", ".parquet"),
        ("a", ""),
        ("a.gz", ""),
    ],
)
def test_extension_is_that_below_gz(name, kind):
    assert extension(Path(name)) == kind


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


@pytest.mark.parametrize(
    "text, delimiter",
    [("tab", "\t"), ("\\t", "\t"), ("comma", ","), ("space", " "), ("|", "|"), ("\t", "\t")],
)
def test_delimiter(text, delimiter):
    assert parse_delimiter(text) == delimiter


@pytest.mark.parametrize("text", ["", "||", '"', "\n", "→", "tabs"])
def test_bad_delimiter_is_refused(text):
    with pytest.raises(InputError, match="give one ASCII character, or tab, comma, space"):
        parse_delimiter(text)
