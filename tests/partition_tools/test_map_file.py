"""Two-column files: entity types and id maps."""

from __future__ import annotations

import gzip

import pytest

from dglkge.errors import InputError
from dglkge.partition.readers.id_folders import read_id_map, read_pairs


def write(path, content: bytes):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_pairs(tmp_path):
    for name in ("m.tsv", "m.txt.gz"):
        path = write(tmp_path / name, b'\xef\xbb\xbfa\tx\r\n\n b\t"y\n')
        assert list(read_pairs(path, ("entity", "type"))) == [(1, "a", "x"), (3, " b", '"y')]
    path = write(tmp_path / "m.csv", b'"a,b",x\n')
    assert list(read_pairs(path, ("entity", "type"))) == [(1, "a,b", "x")]
    path = write(tmp_path / "m.tsv", b"a\tx\tsome label\n")
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
        list(read_pairs(write(tmp_path / "m.tsv", content), ("entity", "type")))


def test_unreadable_pairs(tmp_path):
    (tmp_path / "m.tsv.gz").write_bytes(b"plain")
    for name in ("nothing.tsv", "m.tsv.gz"):
        with pytest.raises(InputError, match="cannot be read"):
            list(read_pairs(tmp_path / name, ("entity", "type")))


def test_id_map_in_any_order(tmp_path):
    assert read_id_map(write(tmp_path / "m.tsv", b"1\tb\n0\ta\n2\t 2\n"), "entity") == ["a", "b", " 2"]


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
        read_id_map(write(tmp_path / "m.tsv", content), "entity")
