"""The files of a dataset but its partitions."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dglkge.data.vocabulary import RelationVocabulary
from dglkge.partition import rows
from dglkge.partition.dataset_writer import PENDING_DESCRIPTION, write_description, write_triples
from dglkge.partition.entity_types import assign_ids
from tests.partition_tools.reading_back import lines, named_triples

ENTITIES = ["Ada", "Bob", "Po", "Rome"]
TYPE_OF = np.array([0, 0, 1, 1], dtype=np.int32)
TRAIN = np.array([[2, 1, 3], [0, 0, 1], [0, 1, 3], [1, 0, 0], [3, 1, 2], [1, 1, 3]], dtype=np.int32)
TEST = np.array([[3, 0, 0]], dtype=np.int32)


def write(folder, weights: bool = False):
    """Write two types, with ``in`` between two pairs and ``meets`` in test between a third."""
    folder.mkdir(exist_ok=True)
    columns = {"train_weights.npy": np.arange(6, dtype=np.float32)} if weights else {}
    splits = {"train": TRAIN, "test": TEST}
    ids = assign_ids(splits, ["meets", "in"], ["person", "place"], TYPE_OF)
    return write_triples(folder, ids.vocabularies(ENTITIES), ids.relations, splits, columns, ids.original_ids)


@pytest.mark.parametrize("rows_at_a_time", [1, 100])
def test_train_is_grouped_by_pair_and_stable_within(tmp_path, rows_at_a_time, monkeypatch):
    monkeypatch.setattr(rows, "ROWS_AT_A_TIME", rows_at_a_time)
    description = write(tmp_path)
    assert named_triples(tmp_path, "train") == [
        ("Ada", "meets", "Bob"),
        ("Bob", "meets", "Ada"),
        ("Ada", "in", "Rome"),
        ("Bob", "in", "Rome"),
        ("Po", "in", "Rome"),
        ("Rome", "in", "Po"),
    ]
    assert description["edge_types"] == [
        ["person", "person", 0, 2],
        ["person", "place", 2, 4],
        ["place", "place", 4, 6],
    ]


def test_other_splits_and_vocabularies(tmp_path):
    description = write(tmp_path)
    assert named_triples(tmp_path, "test") == [("Rome", "meets", "Ada")]
    assert np.load(tmp_path / "valid.npy").shape == (0, 3)
    assert lines(tmp_path / "entities" / "person.txt") == ["Ada", "Bob"]
    assert lines(tmp_path / "entities" / "place.txt") == ["Po", "Rome"]
    labels = RelationVocabulary.load(tmp_path / "relations.tsv").labels
    assert list(labels.names)[:2] == ["meets (person → person)", "meets (place → person)"]
    assert description["entity_types"] == {"person": 2, "place": 2}
    assert description["num_relations"] == 4 and not description["has_weights"]
    assert description["splits"] == {"train": 6, "valid": 0, "test": 1}


def test_fingerprint_sees_every_part(tmp_path):
    plain, weighted, again = (write(tmp_path / name, weights=name == "w") for name in "pwa")
    assert np.load(tmp_path / "w" / "train_weights.npy").tolist() == [1, 3, 2, 5, 0, 4]
    assert weighted["has_weights"] and not plain["has_weights"]
    assert plain["fingerprint"] == again["fingerprint"] != weighted["fingerprint"]


def test_description_waits_for_its_name(tmp_path):
    write_description(tmp_path, {"name": "Ōsaka"})
    assert not (tmp_path / "dataset.json").exists()
    content = (tmp_path / PENDING_DESCRIPTION).read_text(encoding="utf-8")
    assert "Ōsaka" in content
    assert json.loads(content) == {"format_version": 1, "name": "Ōsaka", "checksums": {}}
