"""The verification notices whatever is changed after partitioning."""

from __future__ import annotations

import json
import shutil

import dgl
import numpy as np
import pytest

from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.partition import dataset_writer
from dglkge.partition.build_graph import VerificationError, verify_partitions
from dglkge.partition.make_dataset import partition_dataframe
from dglkge.partition.options import Options
from dglkge.partition.run_build import GraphJob
from tests.partition_tools.conftest import build_in_this_process
from tests.toy_kg import typed_triples


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A typed graph in two partitions."""
    frame, types = typed_triples()
    folder = tmp_path_factory.mktemp("sound")
    (folder / "types.tsv").write_text("".join(f"{name}\t{kind}\n" for name, kind in types.items()))
    options = Options(num_parts=2, method="random", entity_types=folder / "types.tsv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_writer, "run_build", build_in_this_process)
        partition_dataframe(frame, folder / "out", options=options)
    return folder / "out"


@pytest.fixture
def partitions(sound, tmp_path):
    """The partitions of a copy, which a test may change."""
    return shutil.copytree(sound, tmp_path / "out") / "partitions"


def verify(partitions) -> None:
    dataset = Dataset.open(partitions.parent)
    verify_partitions(partitions, GraphJob.of(dataset.description), dataset.split("train"))


def changed(function, *names: str):
    """Return a damage: arrays of a data set replaced by what a function makes of them."""

    def damage(partitions) -> None:
        for name in names:
            np.save(partitions / name, function(np.load(partitions / name)))

    return damage


def swapped(array: np.ndarray, place: int = 0) -> np.ndarray:
    array[[place, place + 1]] = array[[place + 1, place]]
    return array


def other_relation(edges: np.ndarray) -> np.ndarray:
    edges[0, 1] = (edges[0, 1] + 1) % edges[:, 1].max()
    return edges


TABLE_0, TABLE_1 = ([f"part{part}/{name}.npy" for name in ("triple_ids", "edges")] for part in (0, 1))


def take_of_the_other(partitions) -> None:
    """The last triple of partition 0 in partition 1, too."""
    for mine, other in zip(TABLE_1, TABLE_0):
        rows = [np.load(partitions / mine), np.load(partitions / other)[-1:]]
        np.save(partitions / mine, np.concatenate(rows))


def copy_of_the_other(partitions) -> None:
    for name in ("edge_feat.dgl", "graph.dgl", "node_feat.dgl"):
        shutil.copy(partitions / "part0" / name, partitions / "part1" / name)


def outer_node(partitions) -> None:
    path = str(partitions / "part0" / "graph.dgl")
    (graph,), _ = dgl.load_graphs(path)
    graph.ndata["inner_node"][0] = 0
    dgl.save_graphs(path, [graph])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed(swapped, "node_ids_person.npy"), "the id maps of person are not inverse"),
        (changed(lambda ids: ids + 1, "original_ids_town.npy"), "the id maps of town are not inverse"),
        (changed(lambda edges: edges[:, [2, 1, 0]], "part0/edges.npy"), "partition 0: "),
        (changed(other_relation, "part1/edges.npy"), "partition 1: edges .* are not those of the triples"),
        (changed(lambda ids: np.append(ids[:-1], 10**6), "part0/triple_ids.npy"), "1000000 is of no triple"),
        (changed(lambda array: array[1:], *TABLE_1), "partitions hold [0-9]+ of [0-9]+"),
        (changed(swapped, *TABLE_0), "partition 0: triple ids do not ascend"),
        (take_of_the_other, "partition 1: "),
        (copy_of_the_other, None),
        (outer_node, "partition 0: DGL's files hold nodes or edges of other"),
        (lambda partitions: (partitions / "part1" / "edges.npy").unlink(), "part1/edges.npy"),
    ],
)
def test_what_is_changed_is_noticed(partitions, damage, message):
    damage(partitions)
    with pytest.raises((VerificationError, AssertionError, InputError), match=message):
        verify(partitions)


def test_triples_are_checked_in_pieces(partitions, monkeypatch):
    monkeypatch.setattr("dglkge.partition.build_graph.PIECE_ROWS", 7)
    verify(partitions)
    changed(lambda array: swapped(array, 6), *TABLE_0)(partitions)
    with pytest.raises(VerificationError, match="partition 0: triple ids do not ascend"):
        verify(partitions)


def test_dgl_loads_what_was_written(partitions):
    dataset = Dataset.open(partitions.parent)
    config = json.loads(dataset.graph_config_path.read_text())
    assert set(config["ntypes"]) == {"person", "town", "country", "relation"}
    book, name, ntypes, etypes = dgl.distributed.load_partition_book(str(dataset.graph_config_path), 0)
    assert name == dataset.graph_name and set(ntypes) == set(config["ntypes"])
    assert ("relation", "relation_relation", "relation") in etypes
    layout = dataset.layout()
    for ntype in layout.ntypes:
        for part_id in range(2):
            owned = book.partid2nids(part_id, ntype).tolist()
            assert owned == list(range(*layout.node_range(ntype, part_id)))
