"""A checkpoint opened on files alone."""

from __future__ import annotations

import h5py
import pytest
import torch

from dglkge.checkpoint import open_checkpoint
from dglkge.checkpoint import storage as storage_module
from dglkge.errors import CheckpointError, InputError
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import TWO_PAIRS, same, save_toy, saved_toy, toy_meta, toy_tables


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three parts, and its tables."""
    folder = tmp_path_factory.mktemp("run")
    meta = toy_meta(relations=TWO_PAIRS)
    tables = toy_tables(meta)
    for whole in tables.values():
        whole.rows.nan_to_num_(posinf=1.0)
    save_toy(folder / "checkpoint", meta, tables, 3)
    return folder, meta, tables


def test_run_folder_or_checkpoint_folder(run):
    folder, meta, _ = run
    for path in (folder, str(folder), folder / "checkpoint"):
        checkpoint = open_checkpoint(path)
        assert checkpoint.path == folder / "checkpoint"
        assert checkpoint.run_folder == folder
        assert checkpoint.meta == meta
        assert checkpoint.version == 1
    assert checkpoint.config == {"training": {"num_epochs": 9}, "model": {"dimension": 6}}
    assert checkpoint.progress["batches_done"] == 17
    assert checkpoint.entity_types == ["person", "film"]


def test_rows_by_id(run):
    folder, _, tables = run
    people = tables["person"].rows
    table = open_checkpoint(folder)["person"]
    assert table.shape == (23, 6) and len(table) == 23
    assert torch.equal(table[4], people[4])
    assert torch.equal(table[[5, 0, 5]], people[[5, 0, 5]])
    assert torch.equal(table[torch.tensor([22, 1])], people[[22, 1]])
    assert torch.equal(table[torch.tensor([22, 1]).numpy()], people[[22, 1]])
    assert torch.equal(table[3:20:2], people[3:20:2])
    assert table[[]].shape == (0, 6)
    checkpoint = open_checkpoint(folder)
    for ids in ([23], [0, -1]):
        with pytest.raises(InputError, match=r"table 'person' has ids 0..22; got "):
            checkpoint["person"][ids]
    with pytest.raises(InputError, match="unknown table 'persn'; did you mean 'person'"):
        checkpoint["persn"]


def test_rows_by_name(run):
    folder, _, tables = run
    checkpoint = open_checkpoint(folder)
    assert checkpoint.vocabulary("film").id("film-3") == 3
    assert checkpoint.vocabulary("film") is checkpoint.vocabulary("film")
    assert checkpoint.vocabulary("relation").id("likes (person → film)") == 2
    assert checkpoint.relations.labels[1] == "made"
    assert torch.equal(checkpoint["person"]["person-7"], tables["person"].rows[7])
    assert torch.equal(checkpoint["film"][["film-4", "film-0"]], tables["film"].rows[[4, 0]])
    assert torch.equal(checkpoint[RELATION]["made"], tables[RELATION].rows[1])
    assert torch.equal(checkpoint[RELATION]["likes (person → film)"], tables[RELATION].rows[2])
    with pytest.raises(InputError, match="unknown entity 'person-x'; did you mean 'person-"):
        checkpoint["person"]["person-x"]
    with pytest.raises(InputError, match="joins several pairs of entity types; say which: "):
        checkpoint[RELATION]["likes"]


def test_what_is_read_can_be_changed_without_harm(run):
    folder, _, tables = run
    checkpoint = open_checkpoint(folder)
    checkpoint["person"][[1]].zero_()
    for shard in checkpoint.shards("person"):
        shard.rows.zero_()
    assert torch.equal(open_checkpoint(folder)["person"][:], tables["person"].rows)
    open_checkpoint(folder).verify()


def test_shards_hold_each_row_once(run, tmp_path):
    folder, _, tables = run
    for table in ("person", "film", RELATION):
        shards = open_checkpoint(folder).shards(table)
        ids = torch.cat([shard.original_ids for shard in shards])
        assert torch.equal(ids.sort().values, torch.arange(len(tables[table].rows)))
        for shard in shards:
            assert torch.equal(shard.rows, tables[table].rows[shard.original_ids])
            places = shard.locate(torch.arange(len(tables[table].rows)))
            assert torch.equal((places >= 0).nonzero()[:, 0], shard.original_ids)
            assert torch.equal(places[places >= 0], torch.arange(len(shard.original_ids)))
    assert len(open_checkpoint(folder).shards("person")) == 3
    saved_toy(tmp_path, 2, num_people=1)
    empty = open_checkpoint(tmp_path).shards("person")[1]
    assert empty.locate(torch.tensor([0, 3])).tolist() == [-1, -1]


def test_operators_of_another_model(tmp_path):
    saved_toy(tmp_path)
    with h5py.File(tmp_path / "v1" / "model.v1.h5", "r+") as file:
        del file["model/relations/0/operator/rhs/imag"]
    with pytest.raises(
        CheckpointError, match="model.v1.h5: the relations' operators are not those of the run"
    ):
        open_checkpoint(tmp_path)[RELATION]


def test_a_version_that_training_drops_is_read_on(tmp_path):
    """What was opened stays readable, checksums among it, after two newer versions."""
    meta = toy_meta()
    first = toy_tables(meta, 1)
    save_toy(tmp_path, meta, first, 2)
    checkpoint = open_checkpoint(tmp_path, verify=True)
    for seed in (2, 3):
        save_toy(tmp_path, meta, toy_tables(meta, seed), 1)
    assert not (tmp_path / "v1" / "embeddings_person_0.v1.h5").exists()
    for table, whole in first.items():
        assert same(checkpoint[table][:], whole.rows)
    assert checkpoint.state_shapes("person") == {"sum": (12, 6)}
    assert open_checkpoint(tmp_path).version == 3


@pytest.mark.parametrize("num_saves", [1, 3])
def test_a_version_that_is_dropped_while_it_is_opened(tmp_path, monkeypatch, num_saves):
    """Training publishes between the look at the version file and that at the files."""
    meta = toy_meta()
    save_toy(tmp_path, meta, toy_tables(meta, 0))
    real, saves = storage_module.read_version, iter(range(1, 1 + num_saves))

    def read_version(folder, version):
        seed = next(saves, None)
        if seed is not None:
            with monkeypatch.context() as undone:
                undone.setattr(storage_module, "read_version", real)
                save_toy(tmp_path, meta, toy_tables(meta, seed))
        return real(folder, version)

    monkeypatch.setattr(storage_module, "read_version", read_version)
    checkpoint = open_checkpoint(tmp_path, verify=True)
    assert checkpoint.version == 1 + num_saves
    rows = toy_tables(meta, num_saves)["person"].rows
    assert same(checkpoint["person"][:], rows)
