"""``dglkge data``: from a name and a folder without a network to a data set, with counts compared."""

from __future__ import annotations

import json

import pytest

from dglkge.cli.main import main
from dglkge.data import public_data
from dglkge.data.public_data import PublicData
from tests.partition_tools.reading_back import named_triples

pytestmark = pytest.mark.usefixtures("build_here")

COUNTS = {"entities": 3, "relations": 1, "train": 2, "valid": 0, "test": 1}


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """A registry of one data set, in a folder in place of the network."""
    entry = PublicData("Toy-3", "http://127.0.0.1:9/", {"toy.zip": None}, COUNTS, "free", "Nobody 2020")
    monkeypatch.setattr(public_data, "public_data", lambda: {"Toy-3": entry})
    folder = tmp_path / "offline" / "toy-3"
    folder.mkdir(parents=True)
    (folder / "train.tsv").write_text("a\tr\tb\nb\tr\tc\n")
    (folder / "test.tsv").write_text("c\tr\ta\n")
    monkeypatch.setenv("DGLKGE_DATA", str(tmp_path / "offline"))
    monkeypatch.setenv("DGLKGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_name_in_place_of_files(tmp_path, capsys):
    assert main(["data", "build", "toy3"]) == 0
    out = capsys.readouterr().out
    assert "Toy-3: Nobody 2020; licence: free\n" in out and "the dataset lies in data/toy3\n" in out
    assert named_triples(tmp_path / "data" / "toy3", "test") == [("c", "r", "a")]
    described = json.loads((tmp_path / "data" / "toy3" / "dataset.json").read_text())
    assert described["input"]["name"] == "Toy-3"


def test_other_counts_are_refused(tmp_path, capsys, offline):
    (offline / "test.tsv").write_text("c\tr\ta\nc\tr\td\n")
    assert main(["partition", "--input", "toy-3", "--output", "out"]) == 2
    assert capsys.readouterr().err == (
        f"dglkge: error: {offline} has 4 entities, Toy-3 has 3: another version of the data, "
        "or a damaged file; remove the folder and get it again\n"
    )
    assert not (tmp_path / "out").exists()


def test_get_and_list(capsys, offline):
    assert main(["data", "get", "TOY_3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Toy-3: 3 entities, 1 relations, 2 train, 0 valid, 1 test",
        "Nobody 2020",
        "licence: free",
        str(offline),
    ]
    assert main(["data", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["Toy-3"]["counts"] == COUNTS and listed["Toy-3"]["verified_by"] == "counts"
    assert main(["data", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["Toy-3", "3", "1", "2", "0", "1", "counts"]
    assert main(["data", "get", "toy"]) == 2
    assert capsys.readouterr().err.startswith("dglkge: error: unknown data set 'toy'; did you mean 'Toy-3'")


def test_neither_a_file_nor_a_name(capsys):
    assert main(["partition", "toy", "--output", "out"]) == 2
    assert "toy: there is no such file or folder; unknown data set 'toy'" in capsys.readouterr().err
    assert main(["partition", "toy.tsv", "--output", "out"]) == 2
    assert capsys.readouterr().err == "dglkge: error: toy.tsv: there is no such file or folder\n"
    assert main(["partition", "--output", "out"]) == 2
    assert "give a folder or files of triples, or a name of dglkge data list" in capsys.readouterr().err
