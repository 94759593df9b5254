"""Graphs of DGL as sources: objects, files, partitioned ones. The oracle is the graph itself."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl.data.utils
import dgl.distributed
import numpy as np
import pytest
import torch

from dglkge.cli.main import main
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.partition.extend import extend_dataset
from dglkge.partition.make_dataset import dataset_of_run, partition_triples
from dglkge.partition.options import Options, ReadingOptions
from tests.functional.job import dglkge
from tests.toy_kg import typed_triples

pytestmark = pytest.mark.usefixtures("build_here")


@pytest.fixture(scope="module")
def graph() -> dgl.DGLGraph:
    """Three node types, five edge types of four relations."""
    frame, types = typed_triples()
    # Nodes of a type are numbered from 0.
    number = {name: int(name[len(type_) :]) for name, type_ in types.items()}
    edges: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for head, relation, tail in frame.itertuples(index=False):
        edges.setdefault((types[head], relation, types[tail]), []).append((number[head], number[tail]))
    made = dgl.heterograph({key: tuple(map(torch.tensor, zip(*pairs))) for key, pairs in edges.items()})
    for node_type in made.ntypes:
        made.nodes[node_type].data["orig_id"] = torch.arange(made.num_nodes(node_type))
    return made


def edges_of(graph: dgl.DGLGraph) -> Counter:
    edges: Counter = Counter()
    for head_type, relation, tail_type in graph.canonical_etypes:
        heads, tails = graph.edges(etype=(head_type, relation, tail_type))
        rows = zip(heads.tolist(), tails.tolist())
        edges.update((head_type, head, relation, tail_type, tail) for head, tail in rows)
    return edges


def triples_of(dataset: Dataset) -> Counter:
    """Count the same of a data set: names of entities are numbers."""
    triples: Counter = Counter()
    for head, number, tail in dataset.split("train").tolist():
        relation = dataset.relations[number]
        ends = zip((relation.lhs, relation.rhs), (head, tail))
        names = [(type_, int(dataset.vocabulary(type_)[id_])) for type_, id_ in ends]
        triples[(*names[0], relation.name, *names[1])] += 1
    return triples


def save(path: Path, *graphs: dgl.DGLGraph) -> Path:
    dgl.save_graphs(str(path), list(graphs))
    return path


def partition(graph: dgl.DGLGraph, folder: Path, num_parts: int) -> dict[str, np.ndarray]:
    """Partition with DGL; returns the original id of each of its node ids."""
    # DGL fails where a partition gets no node of some type; with this seed each has one.
    dgl.seed(2)
    options = {"part_method": "random", "return_mapping": True}
    with contextlib.redirect_stdout(io.StringIO()):
        ids, _ = dgl.distributed.partition_graph(graph, "kg", num_parts, str(folder), **options)
    ids = ids if isinstance(ids, dict) else {"_N": ids}
    return {name: type_ids.numpy() for name, type_ids in ids.items()}


def dgl_parts(folder: Path, original: dict[str, np.ndarray]) -> dict[str, list[int]]:
    """Return the partition of each original id, by DGL's own description."""
    ranges = json.loads((folder / "kg.json").read_text())["node_map"]
    parts = {}
    for name, type_ranges in ranges.items():
        owners = np.repeat(np.arange(len(type_ranges)), [end - start for start, end in type_ranges])
        parts[name] = owners[np.argsort(original[name])].tolist()
    return parts


def make(source: Any, output: Path, **options: Any) -> Dataset:
    partition_triples(source, output, Options(**options))
    return Dataset.open(output)


def test_triples_are_those_of_the_graph(graph, tmp_path):
    """A saved one is found by its first bytes, too."""
    partition(graph, tmp_path / "parts", 1)
    saved = (save(tmp_path / name, graph) for name in ("graph.bin", "graph.dat"))
    for number, source in enumerate((graph, *saved, tmp_path / "parts")):
        dataset = make(source, tmp_path / f"made{number}")
        assert triples_of(dataset) == edges_of(graph) and dataset.num_parts == 1
    with pytest.raises(InputError, match="the input has entity types of its own: give no --types-from"):
        make(tmp_path / "graph.bin", tmp_path / "refused", reading=ReadingOptions(types_from="near"))
    (tmp_path / "more.tsv").write_text("1\tnear\t2\n")
    with pytest.raises(InputError, match="'1' is the name of a country and of a person"):
        extend_dataset(tmp_path / "made0", [tmp_path / "more.tsv"], tmp_path / "extended", "more")


def with_node_data(folder: Path, original: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return original


def with_files(folder: Path, original: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As DGL's tools write them; node data of the name are of something else."""
    ranges = json.loads((folder / "kg.json").read_text())["node_map"]
    pieces = {}
    for name, ids in original.items():
        counts = [end - start for start, end in ranges[name]]
        pieces[name] = np.split(ids, np.cumsum(counts)[:-1])
    for part in range(3):
        ids = {name: torch.tensor(type_pieces[part]) for name, type_pieces in pieces.items()}
        dgl.data.utils.save_tensors(str(folder / f"part{part}" / "orig_nids.dgl"), ids)
    return original


def without(folder: Path, original: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    for part in range(3):
        dgl.data.utils.save_tensors(str(folder / f"part{part}" / "node_feat.dgl"), {})
    return {name: np.arange(len(ids)) for name, ids in original.items()}


@pytest.mark.parametrize("change", [with_node_data, with_files, without])
def test_partitions_are_those_of_dgl(graph, tmp_path, change: Callable):
    original = partition(graph, tmp_path / "parts", 3)
    names = change(tmp_path / "parts", original)
    options = {"num_parts": 3} if change is with_files else {}
    dataset = make(tmp_path / "parts", tmp_path / "made", **options)
    layout = dataset.layout()
    for name, owners in dgl_parts(tmp_path / "parts", names).items():
        assert layout.part_of(name, np.asarray(layout.node_ids(name))).tolist() == owners
    assert (dataset.num_parts, dataset.part_method) == (3, "random")
    # The triples, with DGL's ids translated.
    place = {name: dict(zip(original[name].tolist(), ids.tolist())) for name, ids in names.items()}
    expected: Counter = Counter()
    for (lhs, head, relation, rhs, tail), count in edges_of(graph).items():
        expected[lhs, place[lhs][head], relation, rhs, place[rhs][tail]] += count
    assert triples_of(dataset) == expected


def relational(relation_type: torch.dtype = torch.int64) -> dgl.DGLGraph:
    heads = torch.arange(120) % 40
    made = dgl.graph((heads, (heads * 7 + torch.arange(120)) % 40))
    made.edata["etype"] = (torch.arange(120) % 5).to(relation_type)
    made.ndata["orig_id"] = torch.arange(40)
    return made


def test_relations_in_edge_data(tmp_path):
    """Of a graph without types: each edge keeps its relation in each form."""
    graph = relational()
    heads, tails = graph.edges(order="eid")
    rows = zip(heads.tolist(), graph.edata["etype"].tolist(), tails.tolist())
    expected = Counter(("entity", head, str(relation), "entity", tail) for head, relation, tail in rows)
    partition(graph, tmp_path / "parts", 2)
    for number, source in enumerate((graph, save(tmp_path / "g.bin", graph), tmp_path / "parts")):
        assert triples_of(make(source, tmp_path / f"made{number}")) == expected
    del graph.edata["etype"]
    plain = make(graph, tmp_path / "plain")
    assert [relation.name for relation in plain.relations.relations] == ["edge"]
    assert plain.entity_types == ["entity"]


def cut(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


def partitioned(folder: Path, **changes: Any) -> Path:
    """Partition in two, with other fields in the description."""
    partition(relational(), folder, 2)
    description = json.loads((folder / "kg.json").read_text())
    (folder / "kg.json").write_text(json.dumps({**description, **changes}))
    return folder


def twice_the_same_id(folder: Path) -> Path:
    graph = relational()
    graph.ndata["orig_id"][3] = 4
    partition(graph, folder, 2)
    return folder


def with_several(folder: Path) -> Path:
    shutil.copy(partitioned(folder) / "kg.json", folder / "other.json")
    return folder


NO_NODE, RELATION_KIND = {"_N": [[0, 40], [40, 40]]}, ReadingOptions(relation_attribute="kind")


@pytest.mark.parametrize(
    ("prepare", "options", "words"),
    [
        (lambda f: save(f / "g.bin", relational(), relational()), {}, "g.bin has 2 graphs, expected one"),
        (lambda f: cut(save(f / "g.bin", relational()), 2000), {}, "g.bin: cannot be read as a graph of D"),
        (lambda f: cut(partitioned(f) / "part1" / "graph.dgl", 0).parents[1], {},
         "graph.dgl: cannot be read as a partition of DGL: "),
        (lambda f: save(f / "g.bin", relational(torch.float32)), {},
         "g.bin: the edge data 'etype' is float32 of shape .120,., expected an integer"),
        (with_several, {}, "has several graphs of DGL: kg.json, other.json"),
        (lambda f: partitioned(f, num_parts="two"), {}, "kg.json: is no description of DGL partitions: "),
        (lambda f: partitioned(f, node_map=NO_NODE), {}, "kg.json: partition 1 has no node of the type '_N'"),
        (twice_the_same_id, {}, "kg.json: the original ids of '_N' are 40 numbers, expected each of 0 to 39"),
        (lambda f: make(relational(), f / "made").path / "partitions", {},
         "partitions has the partitions of the data set .*/made: give that"),
        (partitioned, {"num_parts": 3}, "the input has 2 partitions, which are kept; --num-parts is 3"),
        (partitioned, {"reading": RELATION_KIND}, "the graph's edges have no data 'kind'; they have etype"),
        (partitioned, {"reading": ReadingOptions(name_attribute="kind")},
         "--name-attribute is for GraphML, and the input is a partitioned graph of DGL"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, prepare, options, words):
    with pytest.raises(InputError, match=words):
        partition_triples(prepare(tmp_path), tmp_path / "out", Options(**options))
    assert not (tmp_path / "out").exists()


def test_training_from_a_partitioned_graph(graph, tmp_path, capsys):
    """The data set of a run is made once."""
    parts, run = tmp_path / "parts", tmp_path / "run"
    partition(graph, parts, 1)
    settings = "model.dimension=8 training.num_epochs=1 training.batch_size=48"
    done = dglkge("train", f"dataset={parts}", f"output={run}", "--num-trainers", "1", *settings.split())
    assert "its 1 partitions are kept" in done.stdout and f"next: dglkge predict {run}" in done.stdout
    assert main(["predict", str(run), "--head", "3", "--relation", "lives_in", "-k", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["answers"]) == 2
    made = (run / "dataset").stat().st_ino
    assert dataset_of_run(parts, run, Options(split="auto"))[0] == run / "dataset"
    assert (run / "dataset").stat().st_ino == made
