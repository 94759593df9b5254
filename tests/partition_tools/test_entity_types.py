"""The type of each entity."""

from __future__ import annotations

import pytest

from dglkge.errors import InputError
from dglkge.partition.entity_types import type_name_fault, types_of_entities


def write(folder, text):
    path = folder / "types.tsv"
    path.write_text(text)
    return path


def test_without_a_file_there_is_one_type():
    types, type_of = types_of_entities(None, ["a", "b"], integer_ids=False)
    assert types == ["entity"] and type_of.tolist() == [0, 0]


def test_types_are_sorted_and_unused_ones_left_out(tmp_path):
    path = write(tmp_path, "a\tz\tlabel\nb\ty\nnobody\tx\nb\ty\n")
    types, type_of = types_of_entities(path, ["a", "b"], integer_ids=False)
    assert types == ["y", "z"] and type_of.tolist() == [1, 0]


def test_integer_ids_are_typed_by_id_whatever_their_names(tmp_path):
    types, type_of = types_of_entities(write(tmp_path, "0\tp\n1\tq\n"), ["Ada", "Rome"], integer_ids=True)
    assert types == ["p", "q"] and type_of.tolist() == [0, 1]


def test_entities_without_a_type_or_with_two(tmp_path):
    with pytest.raises(
        InputError, match="types.tsv: 2 entities of the triples have no type, the first is 'b'"
    ):
        types_of_entities(write(tmp_path, "a\tx\n"), ["a", "b", "c"], integer_ids=False)
    with pytest.raises(InputError, match="types.tsv:3: entity 'a' has type 'y', a line before says 'x'"):
        types_of_entities(write(tmp_path, "a\tx\nb\tx\na\ty\n"), ["a", "b"], integer_ids=False)


def test_names_of_types(tmp_path):
    assert [type_name_fault(name) for name in ("entity", "Q5", "a_b", "a.b-c", "_")] == [None] * 5
    assert "is not allowed" in type_name_fault("")
    for name in ("a b", "a:b", "a/b", "ä", "a__b", "relation"):
        assert "is not allowed" in type_name_fault(name)
        with pytest.raises(InputError, match="types.tsv:2: the type .* is not allowed"):
            types_of_entities(write(tmp_path, f"a\tx\nb\t{name}\n"), ["a", "b"], integer_ids=False)
