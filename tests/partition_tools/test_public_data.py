"""The public data sets give the counts that their papers print."""

from __future__ import annotations

import gzip
import json

import pytest

from dglkge.data.dataset import Dataset
from partition_tools import partition
from tests.partition_tools.reading_back import named_triples

COUNTS = {
    "FB15k-237": (14541, 237, 272115, 17535, 20466, 36),
    "WN18RR": (40943, 11, 86835, 3034, 3134, 384),
    "Nations": (14, 55, 1592, 199, 201, 0),
}
"""Entities, relations, train, valid, test, and entities of valid and test unseen in training."""


@pytest.mark.parametrize("name", COUNTS)
def test_counts(shared_datasets, tmp_path, build_here, capsys, name):
    source = shared_datasets / name
    arguments = ["--input", str(source), "--output", str(tmp_path / "out"), "--num-parts", "2", "--json"]
    assert partition.main(arguments) == 0
    figures = json.loads(capsys.readouterr().out)
    entities, relations, train, valid, test, unseen = COUNTS[name]
    assert figures["entity_types"] == {"entity": entities} and figures["num_relations"] == relations
    assert figures["splits"] == {"train": train, "valid": valid, "test": test}
    assert figures["unseen"]["valid_and_test"]["entities"] == unseen
    assert figures["duplicates"] == {"train": 0, "valid": 0, "test": 0}
    assert figures["balance"]["edges"] < 1.1 and figures["balance"]["entities"] < 1.1
    with gzip.open(source / "test.tsv.gz", "rt", encoding="utf-8") as file:
        expected = [tuple(line.rstrip("\n").split("\t")) for line in file]
    assert named_triples(tmp_path / "out", "test") == expected
    assert Dataset.open(tmp_path / "out").num_entities("entity") == entities
