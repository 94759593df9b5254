"""Dataset folders: what is read, numbering and edge tables, and what is refused with the file's name."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import fingerprint, load_json, read_description
from dglkge.data.partition_layout import PartitionLayout, load_array
from dglkge.errors import InputError
from tests.data.toy_folder import (
    BOUNDARIES,
    NODE_IDS,
    PERSONS,
    RELATIONS,
    TOWNS,
    TRAIN,
    VALID,
    write_toy_folder,
)


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


def test_what_is_not_there_is_refused(folder, tmp_path):
    with pytest.raises(InputError, match="no split is called 'dev'; known: train, valid, test"):
        Dataset.open(folder).split("dev")
    with pytest.raises(InputError, match="there is no such folder"):
        Dataset.open(tmp_path / "nothing")
    with pytest.raises(InputError, match="it has no dataset.json"):
        Dataset.open(tmp_path)


NEEDED = """train.npy valid.npy test.npy relations.tsv entities/town.txt partitions/toy.json
partitions/original_ids_person.npy partitions/node_ids_relation.npy partitions/part1/triple_ids.npy
partitions/part0/edges.npy"""
CUT = "train.npy relations.tsv partitions/part1/edges.npy partitions/toy.json dataset.json"


def test_missing_and_cut_off_files_are_named(folder):
    for name, is_cut in [
        *((name, False) for name in NEEDED.split()),
        *((name, True) for name in CUT.split()),
    ]:
        path = folder / name
        content = path.read_bytes()
        path.unlink()
        if is_cut:
            path.write_bytes(content[:-9])
        with pytest.raises(InputError) as caught:
            Dataset.open(folder)
        assert str(path) in str(caught.value)
        path.write_bytes(content)
    assert Dataset.open(folder).name == "toy"


def test_files_that_do_not_fit_are_refused(folder):
    (folder / "entities" / "town.txt").write_text("Rome\n")
    with pytest.raises(InputError, match="town.txt has 1 names, dataset.json says 2"):
        Dataset.open(folder).vocabulary("town")
    np.save(folder / "valid.npy", np.zeros((2, 3), np.int64))
    with pytest.raises(InputError, match=r"valid.npy holds an array \(2, 3\) of int64, expected \(1, 3\)"):
        Dataset.open(folder)
    np.save(folder / "valid.npy", np.zeros((1, 3), np.int32))
    with pytest.raises(InputError, match="of int32, expected .* of int64"):
        Dataset.open(folder)
    np.save(folder / "valid.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="valid.npy"):
        Dataset.open(folder)
    (folder / "relations.tsv").write_text("knows\tperson\tperson\n")
    with pytest.raises(InputError, match="relations.tsv has 1 relations, dataset.json says 3"):
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


def test_what_is_no_json_object(folder):
    path = folder / "dataset.json"
    path.write_text("[1, 2]")
    with pytest.raises(InputError, match="dataset.json holds list, expected a JSON object"):
        read_description(folder)
    for content in (b"{", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="dataset.json is cut off or no JSON"):
            load_json(path)
    with pytest.raises(InputError, match="cannot read .*b.json: No such file"):
        load_json(folder / "b.json")


@pytest.mark.parametrize("shape", [(0,), (0, 3), (5, 3)])
def test_array_is_mapped_read_only(tmp_path, shape):
    np.save(tmp_path / "a.npy", np.zeros(shape, np.int64))
    array = load_array(tmp_path / "a.npy", (None, *shape[1:]), np.int64)
    assert array.shape == shape and not array.flags.writeable


def test_what_is_no_array_of_the_shape(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((5, 3), np.int64))
    for shape in ((5,), (4, 3), (5, 3, 1), (None, 2)):
        with pytest.raises(InputError, match=r"a.npy holds an array \(5, 3\) of int64, expected"):
            load_array(path, shape, np.int64)
    for content in (b"", b"not an array", b"\x93NUMPY\x01\x00"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="a.npy"):
            load_array(path, (None,), np.int64)


def test_fingerprint_is_of_names_sizes_and_contents(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"12")
    second.write_bytes(b"3")
    expected = hashlib.sha256(b"a:2\n12b:1\n3").hexdigest()
    assert fingerprint([first, second]) == expected != fingerprint([second, first])
    # the boundary between two files counts
    first.write_bytes(b"1")
    second.write_bytes(b"23")
    assert fingerprint([first, second]) != expected


def test_moved_folder_opens(folder, tmp_path):
    shutil.move(folder, tmp_path / "elsewhere")
    assert len(Dataset.open(tmp_path / "elsewhere").layout().edge_table(0).triple_ids)


@pytest.fixture
def partitions(tmp_path):
    return write_toy_folder(tmp_path / "toy") / "partitions"


def test_ranges_count_each_type_for_itself(partitions):
    layout = PartitionLayout.open(partitions, "toy")
    assert layout.num_parts == 2 and layout.ntypes == ["person", "relation", "town"]
    for ntype, (start, middle, end) in BOUNDARIES.items():
        assert layout.node_range(ntype, 0) == (start, middle)
        assert layout.node_range(ntype, 1) == (middle, end)
        assert layout.num_nodes(ntype) == end and layout.range_starts(ntype).tolist() == [start, middle, end]
        parts = layout.part_of(ntype, np.arange(end))
        assert parts.dtype == np.int64 and parts.tolist() == [0] * middle + [1] * (end - middle)


def test_id_maps(partitions):
    layout = PartitionLayout.open(partitions, "toy")
    for ntype, ids in NODE_IDS.items():
        assert layout.node_ids(ntype).tolist() == ids
        assert layout.original_ids(ntype)[layout.node_ids(ntype)].tolist() == list(range(len(ids)))


def test_edge_tables_hold_every_triple_once(partitions):
    layout = PartitionLayout.open(partitions, "toy")
    tables = [layout.edge_table(part_id) for part_id in range(2)]
    assert sorted(np.concatenate([t.triple_ids for t in tables]).tolist()) == list(range(len(TRAIN)))
    for part_id, table in enumerate(tables):
        assert table.weights is None and isinstance(table.edges, np.memmap)
        for triple_id, edge in zip(table.triple_ids.tolist(), table.edges.tolist()):
            head, relation, tail = TRAIN[triple_id].tolist()
            rhs = RELATIONS[relation][2]
            assert edge == [NODE_IDS["person"][head], NODE_IDS["relation"][relation], NODE_IDS[rhs][tail]]
            assert layout.part_of(rhs, np.array([edge[2]])).tolist() == [part_id]


def test_empty_edge_table_is_allowed(partitions):
    np.save(partitions / "part0" / "triple_ids.npy", np.zeros(0, np.int64))
    np.save(partitions / "part0" / "edges.npy", np.zeros((0, 3), np.int64))
    assert len(PartitionLayout.open(partitions, "toy").edge_table(0).edges) == 0


def test_foreign_descriptions_are_refused(partitions):
    one_type = {"num_parts": 2, "node_map": {"person": [[0, 4]]}}
    for config in ({}, {"num_parts": 2}, one_type, {"num_parts": 1, "node_map": []}):
        (partitions / "toy.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match="toy.json is no description of DGL partitions"):
            PartitionLayout.open(partitions, "toy")


def test_arrays_of_another_graph_are_refused(partitions):
    np.save(partitions / "part1" / "edges.npy", np.zeros((1, 3), np.int64))
    with pytest.raises(InputError, match="part1/edges.npy holds an array"):
        PartitionLayout.open(partitions, "toy")
    np.save(partitions / "node_ids_person.npy", np.arange(5))
    with pytest.raises(InputError, match=r"node_ids_person.npy holds an array \(5,\)"):
        PartitionLayout.open(partitions, "toy")


def test_maps_open_before_the_edge_tables_exist(partitions):
    (partitions / "part1" / "edges.npy").unlink()
    assert PartitionLayout.open_maps(partitions, "toy").num_parts == 2
    with pytest.raises(InputError, match="part1/edges.npy"):
        PartitionLayout.open(partitions, "toy")


def test_a_machine_needs_the_folder_of_its_own_part_only(partitions):
    everywhere = PartitionLayout.open(partitions, "toy").edge_table(1).triple_ids.tolist()
    shutil.rmtree(partitions / "part0")
    layout = PartitionLayout.open(partitions, "toy")
    assert layout.num_parts == 2 and layout.edge_table(1).triple_ids.tolist() == everywhere
    with pytest.raises(InputError, match="part0/triple_ids.npy"):
        layout.edge_table(0)
    (partitions / "part1" / "edges.npy").unlink()
    with pytest.raises(InputError, match="part1/edges.npy"):
        PartitionLayout.open(partitions, "toy")
    shutil.rmtree(partitions / "part1")
    with pytest.raises(InputError, match="has no partition: .*part0 and the others are missing"):
        PartitionLayout.open(partitions, "toy")
