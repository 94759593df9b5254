"""Two-column files of ids and types, and the type of each entity."""

from __future__ import annotations

import gzip

import pytest

from dglkge.errors import InputError
from dglkge.partition.entity_types import type_name_fault, types_of_entities
from dglkge.partition.readers.id_folders import read_id_map, read_pairs


def write_map(path, content: bytes):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_pairs(tmp_path):
    for name in ("m.tsv", "m.txt.gz"):
        path = write_map(tmp_path / name, b'\xef\xbb\xbfa\tx\r\n\n b\t"y\n')
        assert list(read_pairs(path, ("entity", "type"))) == [(1, "a", "x"), (3, " b", '"y')]
    path = write_map(tmp_path / "m.csv", b'"a,b",x\n')
    assert list(read_pairs(path, ("entity", "type"))) == [(1, "a,b", "x")]
    path = write_map(tmp_path / "m.tsv", b"a\tx\tsome label\n")
    assert list(read_pairs(path, ("entity", "type"), more_columns=True)) == [(1, "a", "x")]
    with pytest.raises(InputError, match="m.tsv:1: got 3 columns, expected entity and type"):
        list(read_pairs(path, ("entity", "type")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.tsv", b"", "m.tsv: the file is empty"),
        ("m.tsv", b"a\tx\nb\n", "m.tsv:2: got 1 columns, expected entity and type"),
        ("m.tsv", b"a\tx\nb\t\n", "m.tsv:2: the type is empty"),
        ("m.tsv", b"a\tx\nb\t\xff\n", "m.tsv:2: byte 3 of the line is not UTF-8"),
        ("m.csv", b'"a,x\n', "m.csv:1: bad quotes"),
        ("m.tsv.gz", None, "m.tsv.gz: cannot be read"),
    ],
)
def test_bad_pairs(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(b"plain" if content is None else content)
    with pytest.raises(InputError, match=message):
        list(read_pairs(tmp_path / name, ("entity", "type")))
    with pytest.raises(InputError, match="nothing.tsv: cannot be read"):
        list(read_pairs(tmp_path / "nothing.tsv", ("entity", "type")))


@pytest.mark.parametrize(
    "content, message",
    [
        (b"x\ta\n", "m.tsv:1: the entity id is 'x', expected an integer from 0"),
        (b"-1\ta\n", "the entity id is '-1'"),
        (b"1" * 5000 + b"\ta\n", "m.tsv:1: the entity id is '1111"),
        (b"0\ta\n0\tb\n", "m.tsv:2: the entity id 0 stands here a second time"),
        (b"0\ta\n1\ta\n", "m.tsv:2: the entity name 'a' stands here and in line 1"),
        (b"0\ta\n2\tb\n", "m.tsv: 2 entity ids reach 2, but 1 is missing"),
        (b"\n", "m.tsv: the file is empty"),
    ],
)
def test_id_maps(tmp_path, content, message):
    """In any order."""
    assert read_id_map(write_map(tmp_path / "m.tsv", b"1\tb\n0\ta\n2\t 2\n"), "entity") == ["a", "b", " 2"]
    with pytest.raises(InputError, match=message):
        read_id_map(write_map(tmp_path / "m.tsv", content), "entity")


def types_of(folder, content: bytes | None, names: str, integer_ids: bool = False):
    path = None if content is None else write_map(folder / "types.tsv", content)
    types, type_of = types_of_entities(path, names.split(), integer_ids)
    return types, type_of.tolist()


def test_types_are_sorted_and_unused_ones_left_out(tmp_path):
    """Integer ids are typed by id, whatever their names; without a file there is one type."""
    assert types_of(tmp_path, None, "a b") == (["entity"], [0, 0])
    assert types_of(tmp_path, b"a\tz\tlabel\nb\ty\nnobody\tx\nb\ty\n", "a b") == (["y", "z"], [1, 0])
    assert types_of(tmp_path, b"0\tp\n1\tq\n", "A R", integer_ids=True) == (["p", "q"], [0, 1])
    for content, names, message in (
        (b"a\tx\n", "a b c", "types.tsv: 2 entities of the triples have no type, the first is 'b'"),
        (b"a\tx\nb\tx\na\ty\n", "a b", "types.tsv:3: entity 'a' has type 'y', a line before says 'x'"),
    ):
        with pytest.raises(InputError, match=message):
            types_of(tmp_path, content, names)


def test_names_of_types(tmp_path):
    assert [type_name_fault(name) for name in ("entity", "Q5", "a_b", "a.b-c", "_")] == [None] * 5
    assert "is not allowed" in type_name_fault("")
    for name in ("a b", "a:b", "a/b", "ä", "a__b", "relation"):
        with pytest.raises(InputError, match="types.tsv:2: the type .* is not allowed"):
            types_of(tmp_path, f"a\tx\nb\t{name}\n".encode(), "a b")
