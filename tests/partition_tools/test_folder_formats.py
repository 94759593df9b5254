"""Folders of DGL-KE, OpenKE, PyKEEN and OGB, whose pickles run no code; GraphML; types from a table."""

from __future__ import annotations

import bz2
import gzip
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from dglkge.data.dataset import Dataset
from dglkge.data.text_format import parse_columns
from dglkge.errors import InputError
from dglkge.partition.extend import extend_dataset
from dglkge.partition.ingest import Reading
from dglkge.partition.make_dataset import partition_triples
from dglkge.partition.options import Options, ReadingOptions
from dglkge.partition.readers.files import find_input
from dglkge.partition.readers.numbered import find_ogb
from tests.partition_tools.conftest import named_triples, names, read

pytestmark = pytest.mark.usefixtures("build_here")

ENTITIES = ["Rome", "New York", "Italy"]
RELATIONS = ["near", "in"]
# Head, relation, tail; neither the order of names nor that of appearance.
TRAIN = [("Italy", "near", "Rome"), ("Rome", "in", "Italy"), ("New York", "near", "Rome")]
TEST = [("New York", "in", "Italy")]


def id_lines(triples, order="hrt", separator=" "):
    rows = [{"h": ENTITIES.index(h), "r": RELATIONS.index(r), "t": ENTITIES.index(t)} for h, r, t in triples]
    return "".join(separator.join(str(row[letter]) for letter in order) + "\n" for row in rows)


def openke(folder, separator=" ", counted=True, suffix="2id"):
    """OpenKE's files; DGL-KE's Freebase has them without a count, as train.txt."""
    folder.mkdir()
    for stem, known in (("entity", ENTITIES), ("relation", RELATIONS)):
        rows = "".join(f"{name}\t{id_}\n" for id_, name in reversed(list(enumerate(known))))
        (folder / f"{stem}2id.txt").write_text(f"{len(known)}\n{rows}")
    for split, triples in (("train", TRAIN), ("test", TEST)):
        count = f"{len(triples)}\n" if counted else ""
        (folder / f"{split}{suffix}.txt").write_text(count + id_lines(triples, "htr", separator))
    return folder


def dglke(folder, ids=False):
    folder.mkdir()
    for stem, known in (("entities", ENTITIES), ("relations", RELATIONS)):
        (folder / f"{stem}.dict").write_text("".join(f"{id_}\t{name}\n" for id_, name in enumerate(known)))
    for split, triples in (("train", TRAIN), ("test", TEST)):
        rows = id_lines(triples, "hrt", "\t") if ids else "".join("\t".join(t) + "\n" for t in triples)
        (folder / f"{split}.txt").write_text(rows)
    return folder


def pykeen(folder, triples, entities=ENTITIES):
    """A folder as TriplesFactory.to_path_binary of PyKEEN 1.11 writes it; its base.pth is not read."""
    folder.mkdir(parents=True)
    (folder / "base.pth").write_bytes(b"")
    for stem, known in (("entity", entities), ("relation", RELATIONS)):
        quoted = [f'"{name}"' if "\t" in name else name for name in known]
        rows = "id\tlabel\n" + "".join(f"{id_}\t{name}\n" for id_, name in enumerate(quoted))
        (folder / f"{stem}_to_id.tsv.gz").write_bytes(gzip.compress(rows.encode()))
    rows = "head\trelation\ttail\n" + id_lines(triples, "hrt", "\t")
    (folder / "numeric_triples.tsv.gz").write_bytes(gzip.compress(rows.encode()))
    return folder


def pykeen_dataset(folder):
    pykeen(folder / "training", TRAIN)
    pykeen(folder / "testing", TEST)
    return folder


def test_folders_keep_their_ids(tmp_path):
    layouts = (
        (openke, "OpenKE's files"),
        (lambda folder: openke(folder, "\t", False, ""), "DGL-KE's files of Freebase (head, tail, relation)"),
        (dglke, "DGL-KE's files"),
        (lambda folder: dglke(folder, ids=True), "DGL-KE's files"),
        (pykeen_dataset, "PyKEEN triples factories"),
    )
    for number, (make, layout) in enumerate(layouts):
        folder = make(tmp_path / f"theirs{number}")
        source, reading = read(folder)
        assert source.line.startswith(f"input: {folder} (")
        assert source.line.endswith(f"): {layout} (by files)")
        assert reading.triples.entities == ENTITIES and reading.triples.relations == RELATIONS
        assert names(reading) == TRAIN and names(reading, "test") == TEST
    # Names win: 1, 0 and 2 are names with other ids here.
    folder, files = dglke(tmp_path / "numbers"), {"entities.dict": "0\t1\n1\t2\n2\t0\n"}
    files |= {"relations.dict": "0\t1\n1\t0\n", "train.txt": "1\t0\t2\n", "test.txt": "1\t0\t2\n"}
    for name, text in files.items():
        (folder / name).write_text(text)
    _, reading = read(folder)
    assert reading.triples.splits["train"].tolist() == [[0, 1, 1]]
    assert reading.figures["layout"].endswith("triples of names")


def test_pykeen_factories_one_by_one(tmp_path):
    train, test = pykeen(tmp_path / "a", TRAIN), pykeen(tmp_path / "my-test", TEST)
    _, reading = read(train)
    assert names(reading) == TRAIN and set(reading.triples.splits) == {"train"}
    _, reading = read([train, pykeen(tmp_path / "v", TEST), test])
    assert names(reading, "test") == TEST and set(reading.triples.splits) == {"train", "valid", "test"}
    _, reading = read(pykeen(tmp_path / "q", TRAIN, ["Ro\tme", "New York", "Italy"]))
    assert reading.triples.entities[0] == "Ro\tme"


def test_which_format_a_folder_has(tmp_path):
    """OpenKE's files beside triples of names are read if the user says so."""
    folder = openke(tmp_path / "d")
    with pytest.raises(InputError, match="its files are not those of a DGL-KE data set .--format dglke"):
        read(folder, format="dglke")
    with pytest.raises(InputError, match="--columns is for tables, and the input is OpenKE's files"):
        find_input([folder], Options(columns=parse_columns("htr")))
    (folder / "train.txt").write_text("a\tb\tc\n")
    assert find_input([folder], Options()).title == "tab-separated text"
    source, reading = read(folder, format="openke")
    assert source.line.endswith("OpenKE's files (as --format says)") and names(reading) == TRAIN
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty has no file called train .*no data set of DGL-KE, OGB, Open"):
        read(tmp_path / "empty")


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_errors_of_folders(tmp_path):
    folders = {"openke": openke(tmp_path / "openke"), "dglke": dglke(tmp_path / "dglke")}
    for name, old, new, message in (
        ("openke/train2id.txt", "3\n", "4\n", ":1: it says 4 triples, the file has 3"),
        ("openke/train2id.txt", "3\n", "", ":1: got '2 0 0', expected the number of lines"),
        ("openke/train2id.txt", "0 2 1", "0 3 1", ":3: the tail id is 3, allowed is 0 to 2"),
        ("openke/entity2id.txt", "3\n", "5\n", ":1: it says 5 names, the file has 3"),
        ("openke/entity2id.txt", "Rome\t0", "Rome\t1", ":4: the entity id 1 stands here a second"),
        ("openke/entity2id.txt", "Rome\t0", "Rome", ":4: got 'Rome', expected entity name and id"),
        ("dglke/train.txt", "Italy\n", "Itly\n", ":2: unknown entity 'Itly'; did you mean 'Italy'"),
        ("dglke/entities.dict", "2\t", "3\t", ": 3 entity ids reach 3, but 2 is missing"),
    ):
        path = tmp_path / name
        text = path.read_text()
        edit(path, old, new)
        with pytest.raises(InputError, match=f"{name}{message}"):
            read(folders[path.parent.name])
        path.write_text(text)


def test_errors_of_pykeen(tmp_path):
    folder = tmp_path / "d"
    pykeen(folder / "training", TRAIN)
    pykeen(folder / "validation", TEST, ["Rome", "Italy", "New York"])
    with pytest.raises(InputError, match="validation: its ids are not those of .*training"):
        read(folder)
    for name, rows, message in (
        ("numeric_triples", b"head\trelation\ttail\n0\t0\t1\n0\t7\t1\n", "3: the relation id is 7"),
        ("entity_to_id", b"id\tlabel\n0\tRome\n1\n", "3: got 1 columns, expected id and label"),
        ("entity_to_id", b"\n", "1: the header is .., expected id and label"),
    ):
        (folder / "training" / f"{name}.tsv.gz").write_bytes(gzip.compress(rows))
        with pytest.raises(InputError, match=f"{name}.tsv.gz:{message}"):
            read(folder / "training")


GRAPHML = """\
<?xml version="1.0" encoding="UTF-8"?>
<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
  <key id="d0" for="node" attr.name="name" attr.type="string"/>
  <key id="d1" for="node" attr.name="kind" attr.type="string"><default>Place</default></key>
  <key id="d2" for="edge" attr.name="label" attr.type="string"/>
  <key id="d3" for="edge" attr.name="weight" attr.type="double"/>
  <graph edgedefault="directed">
    <node id="n0"><data key="d0">Ann &amp; Co</data><data key="d1">Person</data></node>
    <node id="n1"><data key="d0">Rome</data></node>
    <node id="n2"/>
    <edge source="n0" target="n1"><data key="d3">1.5</data><data key="d2">
      lives in</data></edge>
    <edge source="n1" target="n0" directed="false" id="e1"><data key="d2">home of</data></edge>
  </graph>
</graphml>
"""


def test_graphml(tmp_path):
    for name, pack in (("g.graphml", bytes), ("g.graphml.gz", gzip.compress), ("g", bz2.compress)):
        (tmp_path / name).write_bytes(pack(GRAPHML.encode()))
        source, reading = read(tmp_path / name)
        assert source.title.startswith("GraphML") and source.how == ("name" if "." in name else "content")
        assert names(reading) == [("n0", "lives in", "n1"), ("n1", "home of", "n0")]
        assert {"nodes": 3, "edges": 2, "relation_attribute": "label"}.items() <= reading.figures.items()
        undirected = "1 undirected edges: one triple each, from source to target"
        assert reading.notes == [source.line, "the relation is the edges' attribute 'label'", undirected]
    # Its attributes.
    path = tmp_path / "g.graphml"
    path.write_text(GRAPHML.replace("Rome", "<y:a><b>Ro</b>m</y:a>e"))
    _, reading = read(path, name_attribute="name", types_from="kind")
    assert names(reading) == [("Ann & Co", "lives in", "Rome"), ("Rome", "home of", "Ann & Co")]
    types, type_of = reading.types
    assert [types[place] for place in type_of] == ["Person", "Place"]
    edit(path, "home of</data>", "home of</data><data key='d3'>2</data>")
    assert names(read(path, relation_attribute="weight")[1]) == [("n0", "1.5", "n1"), ("n1", "2", "n0")]
    edges = '<edge source="a" target="b" id="likes"/><edge source="b" target="c" id="knows"/>'
    path.write_text(f'<graphml><graph edgedefault="undirected">{edges}</graph></graphml>')
    _, reading = read(path)
    assert names(reading) == [("a", "edge", "b"), ("b", "edge", "c")]
    assert "edges have no relation: all are called 'edge' (see --relation-attribute)" in reading.notes
    assert "2 undirected edges: one triple each, from source to target" in reading.notes
    _, reading = read(path, relation_attribute="id")
    assert names(reading) == [("a", "likes", "b"), ("b", "knows", "c")]


def test_errors_of_graphml(tmp_path):
    for old, new, options, message in (
        ("</edge>", "</node>", {}, "g.graphml:12: column 24: mismatched tag .read as GraphML"),
        ('<data key="d2">home of</data>', "", {}, "g.graphml:13: the edge from 'n1' to 'n0' has no 'label'"),
        ('target="n1"', "", {}, "g.graphml:11: the <edge> has no 'target'"),
        ("graphml", "gexf", {}, "g.graphml:.*"),
        ("a", "a", {"relation_attribute": "k"}, ":12: no attribute 'k' of edges .* has label, weight"),
        ("Rome", "Ann &amp; Co", {"name_attribute": "name"}, "the nodes 'n0' and 'n1' have the same 'name'"),
        ("a", "a", {"types_from": "color"}, "--types-from: no node has the attribute 'color'"),
        ("a", "a", {"literals": "entities"}, "--literals is for RDF, and the input is GraphML"),
    ):
        path = tmp_path / "g.graphml"
        path.write_text(GRAPHML)
        edit(path, old, new)
        with pytest.raises(InputError, match=message):
            read(path, **options)


def test_types_from_a_table(tmp_path, build_here):
    (tmp_path / "t.tsv").write_text("ann\tis_a\tPerson\nrome\tis_a\tCity\nann\tlives\trome\n")
    options = Options(reading=ReadingOptions(types_from="is_a"))
    figures = partition_triples([tmp_path / "t.tsv"], tmp_path / "out", options)
    assert figures["entity_types"] == {"City": 1, "Person": 1} and figures["num_relations"] == 1
    assert named_triples(tmp_path / "out", "train") == [("ann", "lives", "rome")]


RANDOM = Options(method="random")


def table(path: Path, header: str, known: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not in the order of the ids.
    rows = "".join(f"{id_},{name}\n" for id_, name in sorted(enumerate(known), reverse=True))
    path.write_bytes(gzip.compress(f"{header}\n{rows}".encode()))


def save(folder: Path, splits: dict, protocol: int) -> None:
    folder.mkdir(parents=True)
    for split, content in splits.items():
        torch.save(content, folder / f"{split}.pt", pickle_protocol=protocol)


def wikikg2(folder: Path, protocol: int = 2) -> Path:
    """Four entities, the last in no training triple; three candidates for each side."""
    table(folder / "mapping" / "nodeidx2entityid.csv.gz", "node idx,entity id", ["Q9", "Q5", "Q7", "Q1"])
    table(folder / "mapping" / "reltype2relid.csv.gz", "reltype,rel id", ["P2", "P1"])
    splits = {}
    triples = {"train": [(0, 0, 1), (1, 1, 2)], "valid": [(2, 0, 3)], "test": [(1, 1, 0), (0, 1, 2)]}
    for split, rows in triples.items():
        splits[split] = dict(zip(("head", "relation", "tail"), np.array(rows).T))
        if split != "train":
            candidates = np.arange(3 * len(rows)).reshape(-1, 3) % 4
            splits[split] |= {"head_neg": candidates, "tail_neg": (3 - candidates).astype(np.int32)}
    save(folder / "split" / "time", splits, protocol)
    return folder


def biokg(folder: Path) -> Path:
    """Two types, each numbered from 0; tensors as well as lists of types."""
    table(folder / "mapping" / "drug_entidx2name.csv.gz", "ent idx,ent name", ["D1", "D0"])
    table(folder / "mapping" / "disease_entidx2name.csv.gz", "ent idx,ent name", ["C1", "C0", "C2"])
    table(folder / "mapping" / "relidx2relname.csv.gz", "rel idx,rel name", ["treats", "like"])
    triples = {"head_type": ["drug", "drug"], "tail_type": ["disease", "drug"]}
    for name, column in (("head", [1, 0]), ("relation", [0, 1]), ("tail", [2, 1])):
        triples[name] = torch.tensor(column)
    ranked = {**triples, "head_neg": np.array([[0], [1]]), "tail_neg": np.array([[1], [0]])}
    save(folder / "split" / "random", {"train": triples, "valid": ranked, "test": ranked}, 2)
    return folder


def read_ogb(folder: Path) -> Reading:
    return find_ogb(folder).read(lambda path, position: None, Options())


def test_wikikg2(tmp_path):
    """Large arrays need protocol 4, which torch's own safe reader refuses."""
    source = wikikg2(tmp_path / "ogbl_wikikg2", protocol=4)
    figures = partition_triples([source], tmp_path / "out", RANDOM)
    dataset = Dataset.open(tmp_path / "out")
    # Row i of a table is OGB's entity i.
    assert list(dataset.vocabulary("entity").names) == ["Q9", "Q5", "Q7", "Q1"]
    assert named_triples(tmp_path / "out", "train") == [("Q9", "P2", "Q5"), ("Q5", "P1", "Q7")]
    assert named_triples(tmp_path / "out", "test") == [("Q5", "P1", "Q9"), ("Q9", "P1", "Q7")]
    heads, tails = dataset.candidates("test")
    assert heads.tolist() == [[0, 1, 2], [3, 0, 1]] and tails.tolist() == [[3, 2, 1], [0, 3, 2]]
    assert dataset.candidates("valid").shape == (2, 1, 3)
    assert "dglkge evaluate RUN --candidates given" in figures["input"]["notes"][-1]
    with pytest.raises(InputError, match="the train triples of .*out came without candidates"):
        dataset.candidates("train")
    (tmp_path / "new.tsv").write_text("Q9\tP2\tQ77\n")
    extend_dataset(tmp_path / "out", [tmp_path / "new.tsv"], tmp_path / "more", "new")
    assert Dataset.open(tmp_path / "more").candidates("test")[0].tolist() == heads.tolist()


def test_biokg_has_types(tmp_path):
    reading = read_ogb(biokg(tmp_path / "ogbl_biokg"))
    assert reading.types is not None
    types, type_of = reading.types
    assert (types, type_of.tolist()) == (["disease", "drug"], [0, 0, 0, 1, 1])
    assert reading.triples.entities == ["C1", "C0", "C2", "D1", "D0"]
    assert names(reading) == [("D0", "treats", "C2"), ("D1", "like", "D0")]
    # Ids in the type of the answer, as OGB has them.
    assert reading.candidates["valid"].tolist() == [[[0], [1]], [[1], [0]]]


class Harmful:
    """A pickle that would make a file."""

    def __reduce__(self):
        return Path.touch, (Path("mark"),)


def test_no_code_of_a_file_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = wikikg2(tmp_path / "data")
    path = folder / "split" / "time" / "train.pt"
    harmful = io.BytesIO()
    torch.save({"head": Harmful()}, harmful)
    for content in (pickle.dumps(Harmful()), harmful.getvalue()):
        path.write_bytes(content)
        with pytest.raises(InputError, match="train.pt: cannot be read: it names .*, which is no array"):
            partition_triples([folder], tmp_path / "out", RANDOM)
        assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_what_is_missing_is_named(tmp_path):
    folder = wikikg2(tmp_path / "data")
    with pytest.raises(InputError, match="the input has candidates for each triple to rank: its splits stay"):
        partition_triples([folder], tmp_path / "out", Options(drop_leaks="exact"))
    (folder / "mapping" / "reltype2relid.csv.gz").unlink()
    with pytest.raises(InputError, match="there is neither mapping/reltype2relid.csv.gz nor mapping/relidx"):
        partition_triples([folder], tmp_path / "out", RANDOM)
    table(folder / "mapping" / "reltype2relid.csv.gz", "reltype,rel id", ["P2", "P1"])
    save(folder / "again", {"train": {"edge": np.zeros((2, 2))}}, 2)
    (folder / "again" / "train.pt").rename(folder / "split" / "time" / "train.pt")
    with pytest.raises(InputError, match="train.pt has no head and relation and tail: it is no graph"):
        partition_triples([folder], tmp_path / "out", RANDOM)
