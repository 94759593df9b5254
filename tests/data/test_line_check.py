"""The plain search for the first bad line."""

from __future__ import annotations

import pytest

from dglkge.data.text_format import RowRules, TextFormat, first_bad_line

TABS, COMMAS = TextFormat("\t", quoted=False), TextFormat(",", quoted=True)
PLACES = {"head": 0, "relation": 1, "tail": 2}
NAMES, IDS = RowRules(), RowRules({"head": 10, "relation": 3, "tail": 10})


def check(content: bytes, text=TABS, places=PLACES, has_header=False, rules=NAMES):
    return first_bad_line(content.splitlines(keepends=True), text, places, len(places), has_header, rules)


def test_good_lines():
    good = [b"", b"a\tb\tc", b"a\tb\tc\r\n\r\n\nx\ty\tz\n", b"\xef\xbb\xbfa\tb\tc\n", b' \t"\t#\n']
    assert [check(content) for content in good] == [None] * 5
    assert check(b"head,,\na,b,c\n", text=COMMAS, has_header=True) is None
    assert check(b'"a,b",c,d\n', text=COMMAS) is None


@pytest.mark.parametrize(
    "content, line, fault",
    [
        (b"a\tb\tc\n\na\tb\n", 3, "got 2 columns separated by tabs, expected 3"),
        (b"a\tb\tc\td\n", 1, "got 4 columns separated by tabs, expected 3"),
        (b"a b c\n", 1, "expected 3: 'a b c'; see --delimiter"),
        (b"a\tb\tc\na\t\xc3\tc\n", 2, "byte 3 of the line is not UTF-8"),
        (b"\tb\tc\n", 1, "the head is empty"),
        (b"a\t\tc\n", 1, "the relation is empty"),
        (b"a\tb\t\n", 1, "the tail is empty"),
    ],
)
def test_bad_lines_of_names(content, line, fault):
    found = check(content)
    assert found is not None and found[0] == line and fault in found[1]
    inside = first_bad_line([b"a\rx\tb\tc\n"], TABS, PLACES, 3, False, NAMES)
    assert inside == (1, "there is a carriage return inside the line")


@pytest.mark.parametrize(
    "content, fault",
    [
        (b"1\tb\t2\n", "the relation is 'b', expected an integer id"),
        (b"1\t1\t2.0\n", "the tail is '2.0', expected an integer id"),
        (b"10\t1\t2\n", "the head id is 10, allowed is 0 to 9"),
        (b"1\t3\t2\n", "the relation id is 3, allowed is 0 to 2"),
        (b"1\t1\t-2\n", "the tail id is -2, allowed is 0 to 9"),
        ("1\t1\t²\n".encode(), "expected an integer id"),
    ],
)
def test_bad_lines_of_ids(content, fault):
    found = check(content, rules=IDS)
    assert found is not None and fault in found[1]


def test_bad_weights():
    for weight in ("x", "", "nan", "inf", "-1"):
        places = {**PLACES, "weight": 3}
        line, fault = check(f"a\tb\tc\t1e-3\na\tb\tc\t{weight}\n".encode(), places=places)
        assert line == 2 and "the weight is" in fault


def test_bad_headers_and_quotes():
    assert check(b"head,,\na,b\n", text=COMMAS, has_header=True)[0] == 2
    assert "bad quotes" in check(b'"a,b,c\n', text=COMMAS)[1]
