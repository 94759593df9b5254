"""Which file is which split."""

from __future__ import annotations

import pytest

from dglkge.errors import InputError
from dglkge.partition.options import Options
from dglkge.partition.readers.find import find_input, split_of


def find_sources(inputs):
    return {split: path for split, ((path, _),) in find_input(inputs, Options()).files.items()}


def touch(folder, *names):
    paths = [folder / name for name in names]
    for path in paths:
        path.touch()
    return paths


def test_split_of_a_name(tmp_path):
    names = {
        "train": "train.tsv TRAIN.txt.gz fb15k.train.txt",
        "valid": "valid.csv dev.tsv val.parquet wiki-validation.tsv.gz",
        "test": "freebase_mtr100-test.txt",
        None: "training_data.tsv contrain.tsv facts.tsv",
    }
    for split, files in names.items():
        assert {split_of(tmp_path / name) for name in files.split()} == {split}


def test_folder(tmp_path):
    train, test, *_ = touch(tmp_path, "train.tsv.gz", "test.csv", "README.md", "entity_types.tsv", "train.md")
    assert find_sources([tmp_path]) == {"train": train, "test": test}


def test_ambiguous_split(tmp_path):
    paths = touch(tmp_path, "train.tsv", "valid.tsv", "dev.tsv")
    for inputs in ([tmp_path], paths):
        with pytest.raises(InputError, match="the valid split is ambiguous: .*dev.tsv"):
            find_sources(inputs)


def test_files_in_any_order_if_names_say_it_and_else_in_their_order(tmp_path):
    test, train = touch(tmp_path, "a-test.tsv", "a-train.tsv")
    assert find_sources([test, train]) == {"train": train, "test": test}
    paths = touch(tmp_path, "a.tsv", "b.tsv", "c.tsv")
    assert list(find_sources(paths).items()) == list(zip(["train", "valid", "test"], paths))
    assert find_sources(paths[:1]) == {"train": paths[0]}
    assert find_sources([test]) == {"train": test}


def test_some_names_that_say_it_and_some_that_do_not(tmp_path):
    with pytest.raises(InputError, match="facts.tsv: its name does not say which"):
        find_sources(touch(tmp_path, "train.tsv", "facts.tsv"))


def test_wrong_inputs(tmp_path):
    path, *_ = touch(tmp_path, "a.tsv", "test.tsv", "train.json")
    with pytest.raises(
        InputError, match="has no file called train with one of the extensions .csv, .graphml"
    ):
        find_sources([tmp_path])
    with pytest.raises(InputError, match="nothing.tsv: there is no such file or folder"):
        find_sources([tmp_path / "nothing.tsv"])
    with pytest.raises(InputError, match="takes one folder or up to three files; got the folder"):
        find_sources([path, tmp_path])
    with pytest.raises(InputError, match="up to three files .*, got 4"):
        find_sources([path] * 4)
