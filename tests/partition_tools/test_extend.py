"""Extending a data set: old ids and partitions stay, new rows come last, training takes only the new set."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.partition import extend
from dglkge.typing import RELATION
from partition_tools import extend as extend_script
from tests.partition_tools.conftest import run_script
from tests.partition_tools.reading_back import named, named_triples
from tests.toy_kg import toy_dataset

pytestmark = pytest.mark.usefixtures("build_here")


def write(path: Path, *rows: tuple[str, ...]) -> Path:
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return path


def flip_last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_flipped_bits_are_found(tmp_path):
    """In every file of a data set and of one that was extended; oracle: zlib over the whole file."""
    source = write(tmp_path / "more.tsv", ("e003", "turn_1", "e990"))
    extend.extend_dataset(Dataset.open(toy_dataset(2)).path, [source], tmp_path / "new", "more")
    dataset = Dataset.open(tmp_path / "new")
    checksums = dataset.description["checksums"]
    arrays = [f"partitions/part{part}/{name}.npy" for part in (0, 1) for name in ("edges", "triple_ids")]
    assert set(arrays) < set(checksums)
    dataset.verify()
    for name, checksum in checksums.items():
        path = dataset.path / name
        assert zlib.crc32(path.read_bytes()) == checksum
        flip_last_bit(path)
        with pytest.raises(InputError, match=re.escape(f"{path} is damaged: its CRC-32 is ")):
            dataset.verify()
        flip_last_bit(path)
    # what extend.py reads is compared too
    path = dataset.path / "partitions/part1/edges.npy"
    flip_last_bit(path)
    with pytest.raises(InputError, match="part1/edges.npy is damaged"):
        extend.extend_dataset(dataset.path, [source], tmp_path / "newer", "even more")
    shutil.rmtree(path.parent)  # a partition of another machine
    dataset.verify()


def parts_of(dataset: Dataset, type_: str) -> np.ndarray:
    return dataset.layout().part_of(type_, np.asarray(dataset.layout().node_ids(type_)))


def stored_ids(dataset: Dataset, type_: str, part: int) -> np.ndarray:
    """Return the original ids of a partition, as rows of a checkpoint's file stand."""
    layout = dataset.layout()
    return np.sort(layout.original_ids(type_)[slice(*layout.node_range(type_, part))])


@pytest.mark.parametrize("typed", [False, True])
def test_old_ids_and_partitions_stay(tmp_path, typed):
    old = Dataset.open(toy_dataset(2, typed))
    rows = [("e003", "turn_1", "e990"), ("e990", "spin", "e991"), ("e005", "turn_7", "e001")]
    if typed:
        rows = [("person3", "lives_in", "town99"), ("person90", "knows", "person1")]
        rows.append(("person3", "saw", "town1"))
    source = write(tmp_path / "more.tsv", *rows)
    extend.extend_dataset(old.path, [source], tmp_path / "new", "more")
    new = Dataset.open(tmp_path / "new")
    assert new.edge_set_names == ["train", "more"]
    for type_ in old.entity_types:
        before, after = list(old.vocabulary(type_).names), list(new.vocabulary(type_).names)
        assert after[: len(before)] == before
        parts = parts_of(old, type_)
        assert np.array_equal(parts, parts_of(new, type_)[: len(parts)])
        for part in range(2):
            # The old ones, then the new ones.
            old_ids, new_ids = (stored_ids(dataset, type_, part) for dataset in (old, new))
            assert np.array_equal(new_ids[: len(old_ids)], old_ids)
            assert (new_ids[len(old_ids) :] >= len(before)).all()
    assert new.relations.relations[: old.num_relations] == old.relations.relations
    assert new.num_relations == old.num_relations + 1
    assert sorted(named_triples(new.path, "train")) == sorted([*named_triples(old.path, "train"), *rows])
    added = new.split("train")[new.edge_set_of_triples() == 1]
    assert sorted(named(new.path, added)) == sorted(rows)
    assert named_triples(new.path, "test") == named_triples(old.path, "test")
    assert new.fingerprint != old.fingerprint
    # Every triple lies in the partition of its tail.
    owned = [new.layout().edge_table(part).triple_ids for part in range(2)]
    assert sorted(np.concatenate(owned).tolist()) == list(range(len(new.split("train"))))
    assert new.layout().num_nodes(RELATION) == new.num_relations


def test_a_new_entity_goes_where_its_neighbours_are(tmp_path):
    old = Dataset.open(toy_dataset(2))
    names = old.vocabulary("entity")
    for part in (0, 1):
        near = [names[entity] for entity in np.flatnonzero(parts_of(old, "entity") == part)[:5].tolist()]
        source = write(tmp_path / "more.tsv", *[("novum", "turn_1", entity) for entity in near])
        extend.extend_dataset(old.path, [source], tmp_path / f"new{part}", "more")
        new = Dataset.open(tmp_path / f"new{part}")
        assert parts_of(new, "entity")[new.vocabulary("entity").id("novum")] == part


def test_refusals(tmp_path):
    old = toy_dataset(2, True)
    source = write(tmp_path / "more.tsv", ("person1", "owns", "yacht1"))
    with pytest.raises(InputError, match="1 new entities have no type, the first is 'yacht1'.*--entity-t"):
        extend.extend_dataset(old, [source], tmp_path / "new", "more")
    types = write(tmp_path / "types.tsv", ("yacht1", "ship"))
    with pytest.raises(InputError, match="'yacht1' has the type 'ship', which the data set lacks"):
        extend.extend_dataset(old, [source], tmp_path / "new", "more", entity_types=types)
    with pytest.raises(InputError, match="has an edge set 'train' already"):
        extend.extend_dataset(old, [source], tmp_path / "new", "train")
    with pytest.raises(InputError, match="is the data set itself"):
        extend.extend_dataset(old, [source], old, "more", overwrite=True)
    assert not (tmp_path / "new").exists()
    types = write(tmp_path / "types.tsv", ("yacht1", "town"))
    figures = extend.extend_dataset(old, [source], tmp_path / "new", "more", entity_types=types)
    assert figures["added"] == {"edge_set": "more", "triples": 1, "entities": 1, "relations": 1, "times": 0}


def test_command_and_training_of_touched_rows(tmp_path, capsys):
    """The script, then a run from an old one: rows that the new triples lack stay bit by bit."""
    from dglkge.checkpoint import open_checkpoint
    from tests.functional.job import train_alone

    old = toy_dataset()
    source = write(tmp_path / "more.tsv", ("e003", "turn_1", "e990"), ("e990", "turn_7", "e005"))
    words = ["--dataset", old, "--input", source, "--name", "more", "--output", tmp_path / "new"]
    done = run_script(*words, script="extend.py")
    assert done.returncode == 0, done.stderr
    assert "edge set more: 2 triples, 1 new entities, 0 new relations" in done.stdout
    assert extend_script.main(list(map(str, words))) == 2
    err = capsys.readouterr().err
    assert "exists" in err and err.count("\n") == 1
    common = ["model.dimension=8", "training.batch_size=50", "negatives.chunk_size=10",
              "negatives.num_uniform=10", "evaluation.split=none"]  # fmt: skip
    train_alone(*common, f"dataset={old}", f"output={tmp_path / 'a'}", "training.num_epochs=2")
    train_alone(
        *common, f"dataset={tmp_path / 'new'}", f"output={tmp_path / 'b'}", "training.num_epochs=3",
        f"checkpoint.init_path={tmp_path / 'a'}", "training.edge_sets=[more]", "training.rows=touched",
    )  # fmt: skip
    before, after = (open_checkpoint(tmp_path / name) for name in ("a", "b"))
    names = Dataset.open(tmp_path / "new").vocabulary("entity")
    moved = (before["entity"][:] != after["entity"][: len(before["entity"])]).any(1).nonzero().squeeze(1)
    assert {names[entity] for entity in moved.tolist()} == {"e003", "e005"}
    lines = (after.folder / "training_stats.json").read_text().splitlines()
    assert [json.loads(line)["stats"]["count"] for line in lines] == [2, 2, 2]
