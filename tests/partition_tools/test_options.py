"""What is refused before any triple is read, which file is which split, and what progress shows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dglkge.errors import InputError
from dglkge.partition.make_dataset import partition_dataframe
from dglkge.partition.options import Options
from dglkge.partition.readers.files import find_input, split_of
from dglkge.partition.report import reading_progress, show_line


@pytest.mark.parametrize(
    "options, message",
    [
        ({"method": "mets"}, "unknown partition method 'mets'; did you mean 'metis'"),
        ({"num_parts": 0}, "the number of partitions is 0, expected 1 or more"),
        ({"num_workers": 0}, "--num-workers is 0, expected 1 or more"),
        ({"seed": -1}, "the seed is -1, expected 0 to"),
        ({"strict_splits": 1.5}, "--strict-splits is 1.5, expected a share from 0 to 1"),
        ({"strict_splits": float("nan")}, "--strict-splits is nan"),
        ({"relation_map": Path("x")}, "map was given, but the ids are not said to be integers"),
        ({"entity_map": Path("/nowhere"), "integer_ids": True}, "/nowhere: there is no such file"),
        ({"drop_leaks": "exakt"}, "unknown kind of leaks to drop 'exakt'; did you mean 'exact'"),
    ],
)
def test_values_that_are_not_allowed(options, message):
    with pytest.raises(InputError, match=message):
        Options(**options)


@pytest.mark.parametrize(
    ("types", "nodes"), [("ab", r"entities of type 'b' \(2\)"), ("a", r"there are relations \(1\)")]
)
def test_partitions_need_a_node_of_every_type_each(tmp_path, types, nodes):
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


@pytest.mark.parametrize(
    ("files", "inputs", "message"),
    [
        ("train.tsv valid.tsv dev.tsv", "", "the valid split is ambiguous: .*dev.tsv"),
        ("train.tsv valid.tsv dev.tsv", "train.tsv valid.tsv dev.tsv", "the valid split is ambiguous: .*dev"),
        ("train.tsv facts.tsv", "train.tsv facts.tsv", "facts.tsv: its name does not say which"),
        ("a.tsv train.json", "", "has no file called train with one of the extensions .bin, .csv, .graphml"),
        ("", "nothing.tsv", "nothing.tsv: there is no such file or folder"),
        ("a.tsv", "a.tsv .", "takes one folder or up to three files; got the folder"),
        ("a.tsv", "a.tsv a.tsv a.tsv a.tsv", "up to three files .*, got 4"),
    ],
)
def test_wrong_inputs(tmp_path, files, inputs, message):
    touch(tmp_path, *files.split())
    with pytest.raises(InputError, match=message):
        find_sources([tmp_path / name for name in inputs.split()] or [tmp_path])
