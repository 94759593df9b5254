"""One set of triples is split 90/5/5 unless ``--split`` says otherwise, and the output says so."""

from __future__ import annotations

import json

import pytest

from partition_tools import partition
from tests.partition_tools.reading_back import named_triples
from tests.toy_kg import ring_triples

SAID = "one set of triples, split 90/5/5 by a hash; --split 1 keeps all of them for training"


pytestmark = pytest.mark.usefixtures("build_here")


@pytest.fixture
def run(capsys):
    """Run partition.py; returns the exit status and stdout."""

    def call(*words):
        return partition.main([*map(str, words), "--method", "random"]), capsys.readouterr().out

    return call


@pytest.fixture
def ring(tmp_path):
    """A file with a header."""
    ring_triples().to_csv(tmp_path / "all.tsv", sep="\t", index=False)
    return tmp_path / "all.tsv"


def sizes(folder) -> list[int]:
    return list(json.loads((folder / "dataset.json").read_text())["splits"].values())


def test_of_the_command(run, ring, tmp_path):
    status, out = run("--input", ring, "--output", tmp_path / "out")
    assert status == 0 and SAID in out and "header: head is 'head', relation is 'relation'" in out
    train, valid, test = sizes(tmp_path / "out")
    assert train + valid + test == 240
    # Five standard deviations of a binomial.
    assert abs(train - 216) < 5 * (240 * 0.9 * 0.1) ** 0.5 and valid and test
    status, out = run("--input", ring, "--output", tmp_path / "whole", "--method", "random", "--split", "1")
    assert status == 0 and SAID not in out and sizes(tmp_path / "whole") == [240, 0, 0]


def test_of_few_triples_and_of_given_splits(run, tmp_path):
    rows = ring_triples()[:19]
    (tmp_path / "mine").mkdir()
    rows.to_csv(tmp_path / "mine" / "train.tsv", sep="\t", index=False, header=False)
    status, out = run("--input", tmp_path / "mine", "--output", tmp_path / "few")
    assert status == 0 and "19 triples are too few to split: all are for training" in out
    assert sizes(tmp_path / "few") == [19, 0, 0]
    rows[:1].to_csv(tmp_path / "mine" / "valid.tsv", sep="\t", index=False, header=False)
    status, out = run("--input", tmp_path / "mine", "--output", tmp_path / "two")
    assert status == 0 and "split 90/5/5" not in out and sizes(tmp_path / "two") == [19, 1, 0]
    assert named_triples(tmp_path / "two", "valid") == [tuple(rows.iloc[0])]
