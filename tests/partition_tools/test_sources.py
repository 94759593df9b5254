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


@pytest.mark.parametrize(
    "name, split",
    [
        ("train.tsv", "train"),
        ("TRAIN.txt.gz", "train"),
        ("valid.csv", "valid"),
        ("dev.tsv", "valid"),
        ("val.parquet", "valid"),
        ("wiki-validation.tsv.gz", "valid"),
        ("freebase_mtr100-test.txt", "test"),
        ("fb15k.train.txt", "train"),
        ("training_data.tsv", None),
        ("contrain.tsv", None),
        ("facts.tsv", None),
    ],
)
def test_split_of_a_name(tmp_path, name, split):
    assert split_of(tmp_path / name) == split


def test_folder(tmp_path):
    train, test, *_ = touch(tmp_path, "train.tsv.gz", "test.csv", "README.md", "entity_types.tsv", "train.md")
    assert find_sources([tmp_path]) == {"train": train, "test": test}


def test_folder_without_train(tmp_path):
    touch(tmp_path, "test.tsv", "train.json")
    with pytest.raises(
        InputError, match="has no file called train with one of the extensions .csv, .graphml"
    ):
        find_sources([tmp_path])


def test_ambiguous_split(tmp_path):
    paths = touch(tmp_path, "train.tsv", "valid.tsv", "dev.tsv")
    for inputs in ([tmp_path], paths):
        with pytest.raises(
            InputError, match="the valid split is ambiguous: .*dev.tsv|the valid split is ambiguous: valid"
        ):
            find_sources(inputs)


def test_files_with_names_that_say_it_come_in_any_order(tmp_path):
    test, train = touch(tmp_path, "a-test.tsv", "a-train.tsv")
    assert find_sources([test, train]) == {"train": train, "test": test}


def test_files_with_other_names_are_taken_in_order(tmp_path):
    paths = touch(tmp_path, "a.tsv", "b.tsv", "c.tsv")
    assert list(find_sources(paths).items()) == list(zip(["train", "valid", "test"], paths))
    assert find_sources(paths[:1]) == {"train": paths[0]}


def test_one_file_is_train_whatever_its_name(tmp_path):
    (path,) = touch(tmp_path, "test.tsv")
    assert find_sources([path]) == {"train": path}


def test_some_names_that_say_it_and_some_that_do_not(tmp_path):
    with pytest.raises(InputError, match="facts.tsv: its name does not say which"):
        find_sources(touch(tmp_path, "train.tsv", "facts.tsv"))


def test_wrong_inputs(tmp_path):
    (path,) = touch(tmp_path, "a.tsv")
    with pytest.raises(InputError, match="nothing.tsv: there is no such file or folder"):
        find_sources([tmp_path / "nothing.tsv"])
    with pytest.raises(InputError, match="takes one folder or up to three files; got the folder"):
        find_sources([path, tmp_path])
    with pytest.raises(InputError, match="up to three files .*, got 4"):
        find_sources([path] * 4)
