"""Opening dataset folders: what is read, and what is refused with the file's name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import read_description
from dglkge.errors import InputError
from tests.data.toy_folder import PERSONS, RELATIONS, TOWNS, TRAIN, VALID, write_toy_folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_toy_folder(tmp_path / "toy")


def describe(folder: Path, **changes: object) -> None:
    """Change ``dataset.json``; None takes a key out."""
    path = folder / "dataset.json"
    description = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in description.items() if value is not None}))


def test_attributes(folder):
    dataset = Dataset.open(folder)
    assert dataset.path == folder and dataset.name == "toy" and dataset.graph_name == "toy"
    assert dataset.entity_types == ["person", "town"]
    assert [dataset.num_entities(type_) for type_ in dataset.entity_types] == [4, 2]
    assert [(r.name, r.lhs, r.rhs) for r in dataset.relations.relations] == RELATIONS
    assert dataset.num_relations == 3 and dataset.num_parts == 2 and dataset.part_method == "random"
    assert dataset.fingerprint == "f" * 64
    assert dataset.edge_types == [("person", "person", 0, 3), ("person", "town", 3, 5)]
    assert dataset.graph_config_path == folder / "partitions" / "toy.json"


def test_splits_are_mapped_from_the_files(folder):
    dataset = Dataset.open(str(folder))
    assert np.array_equal(dataset.split("train"), TRAIN) and np.array_equal(dataset.split("valid"), VALID)
    assert dataset.split("test").shape == (0, 3)
    assert isinstance(dataset.split("train"), np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        dataset.split("train")[0, 0] = 1


def test_vocabularies(folder):
    dataset = Dataset.open(folder)
    assert list(dataset.vocabulary("person").names) == PERSONS
    assert list(dataset.vocabulary("town").names) == TOWNS
    assert dataset.vocabulary("town") is dataset.vocabulary("town")
    with pytest.raises(InputError, match="no entity type 'country'; known: person, town"):
        dataset.vocabulary("country")


def test_weights(folder, tmp_path):
    assert Dataset.open(folder).train_weights() is None
    weighted = Dataset.open(write_toy_folder(tmp_path / "weighted", has_weights=True))
    assert weighted.has_weights and weighted.train_weights().tolist() == [0, 1, 2, 3, 4]
    assert weighted.layout().edge_table(1).weights.dtype == np.float32


def test_unknown_split_is_refused(folder):
    with pytest.raises(InputError, match="no split is called 'dev'; known: train, valid, test"):
        Dataset.open(folder).split("dev")


def test_what_is_no_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no such folder"):
        Dataset.open(tmp_path / "nothing")
    with pytest.raises(InputError, match="it has no dataset.json"):
        Dataset.open(tmp_path)


@pytest.mark.parametrize(
    "missing",
    [
        "train.npy",
        "valid.npy",
        "test.npy",
        "relations.tsv",
        "entities/town.txt",
        "partitions/toy.json",
        "partitions/original_ids_person.npy",
        "partitions/node_ids_relation.npy",
        "partitions/part1/triple_ids.npy",
        "partitions/part0/edges.npy",
    ],
)
def test_missing_file_is_named(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(InputError) as caught:
        Dataset.open(folder)
    assert str(folder / missing) in str(caught.value)


@pytest.mark.parametrize(
    "cut", ["train.npy", "relations.tsv", "partitions/part1/edges.npy", "partitions/toy.json", "dataset.json"]
)
def test_file_cut_off_is_named(folder, cut):
    path = folder / cut
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError) as caught:
        Dataset.open(folder)
    assert str(path) in str(caught.value)


def test_vocabulary_of_another_size_is_refused(folder):
    (folder / "entities" / "town.txt").write_text("Rome\n")
    with pytest.raises(InputError, match="town.txt has 1 names, dataset.json says 2"):
        Dataset.open(folder).vocabulary("town")


def test_relations_of_another_number_are_refused(folder):
    (folder / "relations.tsv").write_text("knows\tperson\tperson\n")
    with pytest.raises(InputError, match="relations.tsv has 1 relations, dataset.json says 3"):
        Dataset.open(folder)


def test_split_of_another_shape_or_type_is_refused(folder):
    np.save(folder / "valid.npy", np.zeros((2, 3), np.int64))
    with pytest.raises(InputError, match=r"valid.npy holds an array \(2, 3\) of int64, expected \(1, 3\)"):
        Dataset.open(folder)
    np.save(folder / "valid.npy", np.zeros((1, 3), np.int32))
    with pytest.raises(InputError, match="of int32, expected .* of int64"):
        Dataset.open(folder)


def test_pickled_array_is_refused(folder):
    np.save(folder / "valid.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="valid.npy"):
        Dataset.open(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format_version": None}, "not of a dglkge dataset: it has no format_version"),
        ({"format_version": 99}, "format version 99, this dglkge reads 1"),
        ({"num_parts": "2"}, "num_parts is '2', expected int"),
        ({"entity_types": None}, "entity_types is None, expected dict"),
        ({"splits": {"train": 5}}, "splits has no number of triples for 'valid'"),
        ({"num_parts": 3}, "describes 2 partitions, dataset.json says 3"),
        ({"graph_name": "other"}, "other.json"),
    ],
)
def test_description_that_does_not_fit_is_refused(folder, change, message):
    describe(folder, **change)
    with pytest.raises(InputError, match=message):
        Dataset.open(folder)


def test_foreign_description_is_refused(folder):
    (folder / "dataset.json").write_text("[1, 2]")
    with pytest.raises(InputError, match="dataset.json holds list, expected a JSON object"):
        read_description(folder)


def test_moved_folder_opens(folder, tmp_path):
    shutil.move(folder, tmp_path / "elsewhere")
    assert len(Dataset.open(tmp_path / "elsewhere").layout().edge_table(0).triple_ids)
