"""The numbering of nodes and the edge tables of a folder written by hand."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from dglkge.data.partition_layout import PartitionLayout
from dglkge.errors import InputError
from tests.data.toy_folder import BOUNDARIES, NODE_IDS, RELATIONS, TRAIN, write_toy_folder


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
