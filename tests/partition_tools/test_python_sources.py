"""Objects of Python as triples: frames, arrays, rows, graphs and data sets of other packages."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import networkx
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from dglkge.data.text_format import parse_columns
from dglkge.errors import InputError
from dglkge.partition.ingest import Reading
from dglkge.partition.options import Options, ReadingOptions
from dglkge.partition.sources import read_source
from tests.partition_tools.conftest import names

ROWS = [("Alice", "likes", "Bob"), ("Bob", "knows", "Carol"), ("Carol", "likes", "Alice")]
FRAME = pd.DataFrame(ROWS, columns=["head", "relation", "tail"])
POLARS, ARROW = pl.from_pandas(FRAME), pa.Table.from_pandas(FRAME)
ID_ROWS = [(2, 0, 1), (0, 1, 2), (3, 0, 0)]


def read(source, options: Options | None = None, **splits) -> Reading:
    return read_source(source, Path("nowhere"), options or Options(), **splits)


def hugging_face(frame: pd.DataFrame) -> SimpleNamespace:
    """A data set of Hugging Face, as far as it is used."""
    return SimpleNamespace(features=tuple(frame), to_pandas=lambda: frame)


def graph(made: networkx.Graph, name: str, **attributes: object) -> networkx.Graph:
    for head, relation, tail in ROWS:
        made.add_edge(head, tail, **{name: relation}, **attributes)
    return made


@pytest.mark.parametrize(
    "source",
    [
        FRAME, pd.DataFrame(ROWS), FRAME.astype("category"), FRAME.to_records(index=False),
        FRAME.rename(columns={"head": "Subject", "relation": "predicate", "tail": "OBJECT"}),
        FRAME.rename(columns={"head": "h", "relation": "r", "tail": "t"})[["t", "h", "r"]],
        POLARS, POLARS.lazy(), POLARS.with_columns(pl.all().cast(pl.Categorical)),
        ARROW, ARROW.to_reader(), ARROW.cast(pa.schema([(name, pa.large_string()) for name in FRAME])),
        ROWS, [list(row) for row in ROWS], iter(ROWS), FRAME.to_dict("records"), FRAME.to_dict("list"),
        np.array(ROWS), np.array(ROWS, object),
        graph(networkx.MultiDiGraph(), "key"), graph(networkx.DiGraph(), "label", weight=3),
        hugging_face(FRAME), OrderedDict(train=hugging_face(FRAME)),
    ],
    ids=lambda source: type(source).__name__,
)  # fmt: skip
def test_names(source):
    assert names(read(source)) == ROWS


def test_edges_without_a_relation():
    made = networkx.Graph([("a", "b")])
    assert names(read(made)) == [("a", "edge", "b")]
    with pytest.raises(InputError, match="the edge from 'a' to 'b' has no attribute 'kind'"):
        read(made, Options(reading=ReadingOptions(relation_attribute="kind")))


def test_columns_by_name_and_by_order():
    frame = FRAME.assign(score=[0.5, 1, 2])
    options = Options(columns=parse_columns("head=tail,relation=relation,tail=head,weight=score"))
    reading = read(frame, options)
    assert names(reading) == [row[::-1] for row in ROWS]
    assert reading.triples.weights["train"].tolist() == [0.5, 1, 2]
    assert names(read([(h, t, r) for h, r, t in ROWS], Options(columns=parse_columns("htr")))) == ROWS
    assert names(read(set(ROWS))) == sorted(ROWS, key=str)  # the order of a set does not matter


def ids(reading: Reading, split: str = "train") -> list[tuple[int, ...]]:
    return [tuple(row) for row in reading.triples.splits[split].tolist()]


def factory(rows=ID_ROWS, **more_entities: int) -> SimpleNamespace:
    """A ``TriplesFactory`` of PyKEEN, as far as it is used."""
    entities = {"Carol": 3, "Alice": 0, "Bob": 1, "Dora": 2, **more_entities}
    maps = {"entity_to_id": entities, "relation_to_id": {"knows": 1, "likes": 0}}
    return SimpleNamespace(**maps, num_entities=4, num_relations=2, mapped_triples=torch.tensor(rows))


@pytest.mark.parametrize("source", [np.array(ID_ROWS), torch.tensor(ID_ROWS, dtype=torch.int32), ID_ROWS])
def test_ids_stay_as_they_are(source):
    """A row of a table is that of the id; one that does not occur has a row too."""
    reading = read(source, test=np.array([(5, 0, 0)]))
    assert ids(reading) == ID_ROWS and ids(reading, "test") == [(5, 0, 0)]
    assert list(reading.triples.entities) == ["0", "1", "2", "3", "4", "5"]
    assert list(reading.triples.relations) == ["0", "1"] and reading.integer_ids


def test_a_factory_of_pykeen_keeps_ids_and_names():
    reading = read(factory())
    assert ids(reading) == ID_ROWS
    assert list(reading.triples.entities) == ["Alice", "Bob", "Dora", "Carol"]
    assert list(reading.triples.relations) == ["likes", "knows"]
    data = SimpleNamespace(training=factory(), validation=None, testing=factory([(0, 0, 1)]))
    assert list(read(data).triples.splits) == ["train", "test"] and ids(read(data), "test") == [(0, 0, 1)]
    with pytest.raises(InputError, match="the ids of valid are not those of train"):
        read({"training": factory(), "dev": factory(Else=0)})


def test_pykeen_itself():
    data = pytest.importorskip("pykeen.datasets", reason="PyKEEN is not installed").Nations()
    reading = read(data)
    assert ids(reading) == [tuple(row) for row in data.training.mapped_triples.tolist()]
    assert dict(zip(reading.triples.entities, range(data.num_entities))) == data.training.entity_to_id


def test_hugging_face_itself():
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    assert names(read(datasets.Dataset.from_pandas(FRAME))) == ROWS


EDGES = {("person", "likes", "film"): [[0, 2], [1, 0]], ("film", "likes", "film"): [[1], [0]]}


class Hetero(dict):
    """A ``HeteroData`` of PyTorch Geometric, as far as it is used."""

    edge_types, node_types, edge_index_dict = list(EDGES), ["person", "film"], {}


def test_graphs_with_types():
    """Entities of each type have the numbers that they have in the graph; of DGL's see test_dgl_graph.py."""
    data = Hetero({key: SimpleNamespace(edge_index=torch.tensor(ends)) for key, ends in EDGES.items()})
    data |= {"person": SimpleNamespace(num_nodes=3), "film": SimpleNamespace(num_nodes=2)}
    reading = read(data)
    types, type_of = reading.types
    assert types == ["film", "person"] and type_of.tolist() == [0, 0, 1, 1, 1]
    assert list(reading.triples.entities) == ["0", "1", "0", "1", "2"]
    assert sorted(ids(reading)) == [(1, 0, 0), (2, 0, 1), (4, 0, 0)]
    assert list(reading.triples.relations) == ["likes"]
    with pytest.raises(InputError, match="the input has entity types of its own"):
        read(data, Options(reading=ReadingOptions(types_from="type")))


def test_types_from_a_relation():
    kinds = [(name, "type", kind) for name, kind in zip(("Alice", "Bob", "Carol"), "xyx")]
    reading = read([*ROWS, *kinds], Options(reading=ReadingOptions(types_from="type")))
    assert reading.types[0] == ["x", "y"]
    assert list(reading.triples.relations) == ["knows", "likes"] and len(reading.triples.splits["train"]) == 3


def test_pytorch_geometric_itself():
    geometric = pytest.importorskip("torch_geometric.data", reason="PyTorch Geometric is not installed")
    data = geometric.HeteroData()
    data["person"].num_nodes, data["film"].num_nodes = 3, 2
    for key, ends in EDGES.items():
        data[key].edge_index = torch.tensor(ends)
    assert sorted(ids(read(data))) == [(1, 0, 0), (2, 0, 1), (4, 0, 0)]


def test_what_is_refused():
    for source, words in (
        (3, "train is of type int; expected a data frame"),
        (np.zeros((2, 3)), "train is an array of float64, expected integer ids or names"),
        (np.zeros((2, 4), int), "train is an array of shape .2, 4., expected .n, 3.: head, relation, tail"),
        (np.array([[0, 0, -1]]), "train: row 1: the entity ids are .0, -1., allowed is 0 to"),
        (np.array([[0, 10**7, 1]]), "the relation ids reach 10,000,000, and there are 1 triples"),
        ([("a", "r", "b"), ("a", "r")], "train: row 2 is ..'a', 'r'.., expected head, relation, tail"),
        (factory([(4, 0, 0)]), "train: row 1: the entity ids are .4, 0., allowed is 0 to 3"),
        ({"valid": ROWS}, "the splits are valid; expected train among them"),
        ({"train": ROWS, "test": ID_ROWS}, "train has names|test has names|give both in one form"),
        (FRAME.assign(head=[1, "a", 2.5]), "train: a column mixes several types"),
        (np.zeros((0, 3), int), "train has no triples"),
        (["no such file"], "no such file: there is no such file or folder; unknown data set"),
        (["nowhere/fb15k-237"], "nowhere/fb15k-237: there is no such file"),  # no name of a data set
    ):
        with pytest.raises(InputError, match=words):
            read(source)
