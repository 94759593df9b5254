"""OGB's folders: ids, names, types and the given candidates; no code of their pickles runs."""

from __future__ import annotations

import gzip
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.partition.extend import extend_dataset
from dglkge.partition.ingest import Reading
from dglkge.partition.make_dataset import partition_triples
from dglkge.partition.options import Options
from dglkge.partition.readers.numbered import find_ogb
from tests.partition_tools.conftest import names
from tests.partition_tools.reading_back import named_triples

OPTIONS = Options(method="random")
pytestmark = pytest.mark.usefixtures("build_here")


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


def read(folder: Path) -> Reading:
    return find_ogb(folder).read(lambda path: lambda position: None, Options())


def test_wikikg2(tmp_path):
    figures = partition_triples([wikikg2(tmp_path / "ogbl_wikikg2")], tmp_path / "out", OPTIONS)
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


def test_both_formats_of_torch(tmp_path):
    """Large arrays need protocol 4, which torch's own safe reader refuses."""
    two, four = (read(wikikg2(tmp_path / str(protocol), protocol)) for protocol in (2, 4))
    for split, rows in two.triples.splits.items():
        assert four.triples.splits[split].tolist() == rows.tolist()
    assert four.candidates["test"].tolist() == two.candidates["test"].tolist()


def test_biokg_has_types(tmp_path):
    reading = read(biokg(tmp_path / "ogbl_biokg"))
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
            partition_triples([folder], tmp_path / "out", OPTIONS)
        assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_what_is_missing_is_named(tmp_path):
    folder = wikikg2(tmp_path / "data")
    with pytest.raises(InputError, match="the input has candidates for each triple to rank: its splits stay"):
        partition_triples([folder], tmp_path / "out", Options(drop_leaks="exact"))
    (folder / "mapping" / "reltype2relid.csv.gz").unlink()
    with pytest.raises(InputError, match="there is neither mapping/reltype2relid.csv.gz nor mapping/relidx"):
        partition_triples([folder], tmp_path / "out", OPTIONS)
    table(folder / "mapping" / "reltype2relid.csv.gz", "reltype,rel id", ["P2", "P1"])
    save(folder / "again", {"train": {"edge": np.zeros((2, 2))}}, 2)
    (folder / "again" / "train.pt").rename(folder / "split" / "time" / "train.pt")
    with pytest.raises(InputError, match="train.pt has no head and relation and tail: it is no graph"):
        partition_triples([folder], tmp_path / "out", OPTIONS)
