"""What is refused before any triple is read; which file is which split; files of ids and types; progress."""

from __future__ import annotations

import gzip
from pathlib import Path

import pandas as pd
import pytest

from dglkge.errors import InputError
from dglkge.partition.entity_types import type_name_fault, types_of_entities
from dglkge.partition.make_dataset import partition_dataframe
from dglkge.partition.options import Options
from dglkge.partition.readers.files import find_input, split_of
from dglkge.partition.readers.id_folders import read_id_map, read_pairs
from dglkge.partition.report import reading_progress, show_line


def test_values_that_are_not_allowed():
    for options, message in (
        ({"method": "mets"}, "unknown partition method 'mets'; did you mean 'metis'"),
        ({"num_parts": 0}, "the number of partitions is 0, expected 1 or more"),
        ({"num_workers": 0}, "--num-workers is 0, expected 1 or more"),
        ({"seed": -1}, "the seed is -1, expected 0 to"),
        ({"strict_splits": 1.5}, "--strict-splits is 1.5, expected a share from 0 to 1"),
        ({"strict_splits": float("nan")}, "--strict-splits is nan"),
        ({"relation_map": Path("x")}, "map was given, but the ids are not said to be integers"),
        ({"entity_map": Path("/nowhere"), "integer_ids": True}, "/nowhere: there is no such file"),
        ({"drop_leaks": "exakt"}, "unknown kind of leaks to drop 'exakt'; did you mean 'exact'"),
    ):
        with pytest.raises(InputError, match=message):
            Options(**options)


def test_partitions_need_a_node_of_every_type_each(tmp_path):
    for types, nodes in (("ab", r"entities of type 'b' \(2\)"), ("a", r"there are relations \(1\)")):
        names = [f"{types[place % len(types)]}{place}" for place in range(5)]
        (tmp_path / "types.tsv").write_text("".join(f"{name}\t{name[0]}\n" for name in names))
        frame = pd.DataFrame([(name, "r", names[0]) for name in names], columns=["head", "relation", "tail"])
        with pytest.raises(InputError, match=f"3 partitions are more than .*{nodes}"):
            options = Options(num_parts=3, entity_types=tmp_path / "types.tsv")
            partition_dataframe(frame, tmp_path / "out", options=options)


def test_progress_is_shown_on_stderr_where_asked_for(tmp_path, capsys):
    path = tmp_path / "t.tsv"
    path.write_bytes(b"x" * 100)
    for progress in (False, None, True):
        assert capsys.readouterr() == ("", "")
        with reading_progress([path if progress else tmp_path / "missing.tsv"], progress) as on_bytes:
            on_bytes(path)(40)
            on_bytes(path)(100)
        show_line(progress, "partitioning")
    out, err = capsys.readouterr()
    assert out == "" and "100%" in err and "partitioning\n" in err


def find_sources(inputs):
    return {split: path for split, ((path, _),) in find_input(inputs, Options()).files.items()}


def touch(folder, *names):
    paths = [folder / name for name in names]
    for path in paths:
        path.touch()
    return paths


def test_splits_by_names_of_files_and_else_by_their_order(tmp_path):
    names = {
        "train": "train.tsv TRAIN.txt.gz fb15k.train.txt",
        "valid": "valid.csv dev.tsv val.parquet wiki-validation.tsv.gz",
        "test": "freebase_mtr100-test.txt",
        None: "training_data.tsv contrain.tsv facts.tsv",
    }
    for split, files in names.items():
        assert {split_of(tmp_path / name) for name in files.split()} == {split}
    train, test, *_ = touch(tmp_path, "train.tsv.gz", "test.csv", "README.md", "entity_types.tsv", "train.md")
    assert find_sources([tmp_path]) == find_sources([test, train]) == {"train": train, "test": test}
    paths = touch(tmp_path, "a.tsv", "b.tsv", "c.tsv")
    assert list(find_sources(paths).items()) == list(zip(["train", "valid", "test"], paths))
    assert find_sources(paths[:1]) == {"train": paths[0]} and find_sources([test]) == {"train": test}


def test_wrong_inputs(tmp_path):
    cases = (
        ("train.tsv valid.tsv dev.tsv", "", "the valid split is ambiguous: .*dev.tsv"),
        ("train.tsv valid.tsv dev.tsv", "train.tsv valid.tsv dev.tsv", "the valid split is ambiguous: .*dev"),
        ("train.tsv facts.tsv", "train.tsv facts.tsv", "facts.tsv: its name does not say which"),
        ("a.tsv train.json", "", "has no file called train with one of the extensions .bin, .csv, .graphml"),
        ("", "nothing.tsv", "nothing.tsv: there is no such file or folder"),
        ("a.tsv", "a.tsv .", "takes one folder or up to three files; got the folder"),
        ("a.tsv", "a.tsv a.tsv a.tsv a.tsv", "up to three files .*, got 4"),
    )
    for number, (files, inputs, message) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        touch(folder, *files.split())
        with pytest.raises(InputError, match=message):
            find_sources([folder / name for name in inputs.split()] or [folder])


def write_map(path, content: bytes):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def pairs(path, content: bytes, **options) -> list[tuple[int, str, str]]:
    return list(read_pairs(write_map(path, content), ("entity", "type"), **options))


def test_pairs(tmp_path):
    for name in ("m.tsv", "m.txt.gz"):
        rows = pairs(tmp_path / name, b'\xef\xbb\xbfa\tx\r\n\n b\t"y\n')
        assert rows == [(1, "a", "x"), (3, " b", '"y')]
    assert pairs(tmp_path / "m.csv", b'"a,b",x\n') == [(1, "a,b", "x")]
    assert pairs(tmp_path / "m.tsv", b"a\tx\tsome label\n", more_columns=True) == [(1, "a", "x")]
    for name, content, message in (
        ("m.tsv", b"a\tx\tsome label\n", "m.tsv:1: got 3 columns, expected entity and type"),
        ("m.tsv", b"", "m.tsv: the file is empty"),
        ("m.tsv", b"a\tx\nb\n", "m.tsv:2: got 1 columns, expected entity and type"),
        ("m.tsv", b"a\tx\nb\t\n", "m.tsv:2: the type is empty"),
        ("m.tsv", b"a\tx\nb\t\xff\n", "m.tsv:2: byte 3 of the line is not UTF-8"),
        ("m.csv", b'"a,x\n', "m.csv:1: bad quotes"),
    ):
        with pytest.raises(InputError, match=message):
            pairs(tmp_path / name, content)
    write_map(tmp_path / "m.tsv", b"plain").rename(tmp_path / "plain.tsv.gz")
    for name in ("plain.tsv.gz", "nothing.tsv"):
        with pytest.raises(InputError, match=f"{name}: cannot be read"):
            list(read_pairs(tmp_path / name, ("entity", "type")))


def test_id_maps(tmp_path):
    path = tmp_path / "m.tsv"
    assert read_id_map(write_map(path, b"1\tb\n0\ta\n2\t 2\n"), "entity") == ["a", "b", " 2"]
    for content, message in (
        (b"x\ta\n", "m.tsv:1: the entity id is 'x', expected an integer from 0"),
        (b"-1\ta\n", "the entity id is '-1'"),
        (b"1" * 5000 + b"\ta\n", "m.tsv:1: the entity id is '1111"),
        (b"0\ta\n0\tb\n", "m.tsv:2: the entity id 0 stands here a second time"),
        (b"0\ta\n1\ta\n", "m.tsv:2: the entity name 'a' stands here and in line 1"),
        (b"0\ta\n2\tb\n", "m.tsv: 2 entity ids reach 2, but 1 is missing"),
        (b"\n", "m.tsv: the file is empty"),
    ):
        with pytest.raises(InputError, match=message):
            read_id_map(write_map(path, content), "entity")


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
