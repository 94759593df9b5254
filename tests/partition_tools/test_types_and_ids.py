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
    "content, message",
    [
        (b"", "m.tsv: the file is empty"),
        (b"a\tx\nb\n", "m.tsv:2: got 1 columns, expected entity and type"),
        (b"a\tx\nb\t\n", "m.tsv:2: the type is empty"),
        (b"a\tx\nb\t\xff\n", "m.tsv:2: byte 3 of the line is not UTF-8"),
    ],
)
def test_bad_pairs(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        list(read_pairs(write_map(tmp_path / "m.tsv", content), ("entity", "type")))


def test_unreadable_pairs(tmp_path):
    (tmp_path / "m.tsv.gz").write_bytes(b"plain")
    for name in ("nothing.tsv", "m.tsv.gz"):
        with pytest.raises(InputError, match="cannot be read"):
            list(read_pairs(tmp_path / name, ("entity", "type")))


def test_id_map_in_any_order(tmp_path):
    assert read_id_map(write_map(tmp_path / "m.tsv", b"1\tb\n0\ta\n2\t 2\n"), "entity") == ["a", "b", " 2"]


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
def test_bad_id_maps(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        read_id_map(write_map(tmp_path / "m.tsv", content), "entity")


def write_types(folder, text):
    path = folder / "types.tsv"
    path.write_text(text)
    return path


def test_without_a_file_there_is_one_type():
    types, type_of = types_of_entities(None, ["a", "b"], integer_ids=False)
    assert types == ["entity"] and type_of.tolist() == [0, 0]


def test_types_are_sorted_and_unused_ones_left_out(tmp_path):
    path = write_types(tmp_path, "a\tz\tlabel\nb\ty\nnobody\tx\nb\ty\n")
    types, type_of = types_of_entities(path, ["a", "b"], integer_ids=False)
    assert types == ["y", "z"] and type_of.tolist() == [1, 0]


def test_integer_ids_are_typed_by_id_whatever_their_names(tmp_path):
    types, type_of = types_of_entities(write_types(tmp_path, "0\tp\n1\tq\n"), ["A", "R"], integer_ids=True)
    assert types == ["p", "q"] and type_of.tolist() == [0, 1]


def test_entities_without_a_type_or_with_two(tmp_path):
    with pytest.raises(
        InputError, match="types.tsv: 2 entities of the triples have no type, the first is 'b'"
    ):
        types_of_entities(write_types(tmp_path, "a\tx\n"), ["a", "b", "c"], integer_ids=False)
    with pytest.raises(InputError, match="types.tsv:3: entity 'a' has type 'y', a line before says 'x'"):
        types_of_entities(write_types(tmp_path, "a\tx\nb\tx\na\ty\n"), ["a", "b"], integer_ids=False)


def test_names_of_types(tmp_path):
    assert [type_name_fault(name) for name in ("entity", "Q5", "a_b", "a.b-c", "_")] == [None] * 5
    assert "is not allowed" in type_name_fault("")
    for name in ("a b", "a:b", "a/b", "ä", "a__b", "relation"):
        assert "is not allowed" in type_name_fault(name)
        with pytest.raises(InputError, match="types.tsv:2: the type .* is not allowed"):
            types_of_entities(write_types(tmp_path, f"a\tx\nb\t{name}\n"), ["a", "b"], integer_ids=False)
