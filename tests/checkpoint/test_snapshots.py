"""Kept versions: pointers epoch_{E} and best, which outlive newer ones and moves of the folder."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from dglkge.checkpoint import CheckpointManager, open_checkpoint
from dglkge.checkpoint.manager import fall_back
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.errors import CheckpointError, InputError
from dglkge.inference.run import open_run
from tests.checkpoint.toy_checkpoint import flip, same, save_alone, saved_toy, toy_meta, toy_tables
from tests.checkpoint.toy_checkpoint import holds as has_tables

META = toy_meta()


def save(path, seed, *names):
    """Save the toy's tables of a seed, kept under some names."""
    return save_alone(path, META, toy_tables(META, seed), *names)


def holds(path, seed):
    """Check that a checkpoint is whole and has the tables of a seed; return it."""
    checkpoint = open_checkpoint(path)
    has_tables(path, META, {checkpoint.version: toy_tables(META, seed)})
    return checkpoint


def test_a_version_with_a_pointer_stays(tmp_path):
    for seed in (1, 2, 3, 4):
        save(tmp_path / "a", seed, *(["epoch_2"] if seed == 2 else []))
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["checkpoint_version.txt", "epoch_2", "latest", "v2", "v4"]
    shutil.move(tmp_path / "a", tmp_path / "b")
    kept = holds(tmp_path / "b" / "epoch_2", 2)
    assert kept.version == 2 and kept.vocabulary("person")[3] == "person-3"
    assert kept.versions() == [2, 4] and kept.path == tmp_path / "b" / "epoch_2"
    assert holds(tmp_path / "b", 4).version == holds(tmp_path / "b" / "latest", 4).version == 4
    assert open_checkpoint(tmp_path / "b" / "latest").root == tmp_path / "b"
    assert holds(tmp_path / "b" / "v2", 2).version == open_checkpoint(tmp_path / "b", 2).version == 2
    shutil.copytree(tmp_path / "b" / "v2", tmp_path / "alone")
    assert holds(tmp_path / "alone", 2).run_folder == tmp_path / "alone"


def test_parts_and_their_state(tmp_path):
    """The rows of a file and their optimizer's state, by original id."""
    meta, tables = saved_toy(tmp_path, 3)
    checkpoint = open_checkpoint(tmp_path, verify=True)
    ids = []
    for k in range(3):
        rows, original_ids = checkpoint.part("person", k)
        assert same(rows, tables["person"].rows[original_ids])
        assert torch.equal(checkpoint.state("person", k)["sum"], tables["person"].state["sum"][original_ids])
        ids += original_ids.tolist()
    assert sorted(ids) == list(range(23))
    with pytest.raises(InputError, match=r"'person' has the parts 0..2; got 3"):
        checkpoint.part("person", 3)
    with pytest.raises(InputError, match="unknown entity type 'film'"):
        checkpoint.state("film", 0)
    flip(tmp_path / "v1" / "embeddings_person_1.v1.h5", 3000)
    with pytest.raises(CheckpointError, match="embeddings_person_1.v1.h5 is damaged"):
        open_checkpoint(tmp_path, verify=True).part("person", 1)


def test_a_pointer_to_other_rows_is_refused(tmp_path):
    """A version of the same number that another job wrote is not the one that was kept."""
    save(tmp_path / "a", 1, "epoch_1")
    save(tmp_path / "b", 2)
    shutil.rmtree(tmp_path / "a" / "v1")
    shutil.copytree(tmp_path / "b" / "v1", tmp_path / "a" / "v1")
    with pytest.raises(CheckpointError, match="epoch_1 names version 1 with the checksum .* another one"):
        open_checkpoint(tmp_path / "a" / "epoch_1")
    (tmp_path / "a" / "epoch_1").write_text("{}")
    with pytest.raises(CheckpointError, match="epoch_1 is missing or damaged"):
        open_checkpoint(tmp_path / "a" / "epoch_1")


def test_a_pointer_that_a_killed_job_did_not_write_is_written_by_the_next(tmp_path):
    save(tmp_path, 1, "epoch_1")
    (tmp_path / "epoch_1").unlink()
    save(tmp_path, 2)
    assert holds(tmp_path / "epoch_1", 1).version == 1


def test_inspect_verifies_kept_versions(tmp_path):
    """A flipped bit in any file of a version that only snapshots need is found."""
    for seed in (1, 2, 3):
        save(tmp_path / "checkpoint", seed, *(["epoch_1"] if seed == 1 else []))
    run = open_run(tmp_path)
    assert run.inspect(verify=True)["verified"]
    kept = sorted((tmp_path / "checkpoint" / "v1").glob("*.h5"))
    assert len(kept) == 2
    for path in kept:
        flip(path, -1)
        with pytest.raises(CheckpointError, match=path.name):
            run.inspect(verify=True)
        flip(path, -1)


def test_what_biggraph_writes_in_place_does_not_reach_another_version(tmp_path):
    """It truncates config.json and appends to training_stats.json when it resumes a run."""
    save(tmp_path, 1, "epoch_1")
    save(tmp_path, 2)
    with open(tmp_path / "v2" / "config.json", "r+") as file:
        file.truncate(0)
        file.write("{}")
    with open(tmp_path / "v2" / "training_stats.json", "a") as file:
        file.write("{}")
    holds(tmp_path / "epoch_1", 1)
    assert (tmp_path / "v1" / "training_stats.json").read_text() == ""
    with pytest.raises(CheckpointError, match="config.json is damaged: it has 2 bytes"):
        open_checkpoint(tmp_path)


def test_the_best_is_replaced_by_a_better_one_only(tmp_path):
    manager = CheckpointManager(tmp_path)
    kept = []
    for seed, score in enumerate([0.2, 0.5, 0.3, 0.5, 0.6]):
        save(tmp_path, seed)
        assert not manager.keep_best(float("nan"), {})  # also as the first score
        kept.append(manager.keep_best(score, {"finished_epochs": seed + 1}))
    assert kept == [True, True, False, False, True]
    assert holds(tmp_path / "best", 4).version == 5
    note, checksum = manager.storage.read_pointer("best"), manager.storage.stored(5).checksum
    assert note == {"version": 5, "checksum": checksum, "score": 0.6, "finished_epochs": 5}
    save(tmp_path, 9)
    assert {path.name for path in tmp_path.glob("v*")} == {"v5", "v6"}


def test_fallback_takes_the_newest_good_version(tmp_path, caplog):
    save(tmp_path, 1, "epoch_1")
    save(tmp_path, 2, "epoch_2")
    save(tmp_path, 3, "epoch_3")
    flip(tmp_path / "v3" / "model.v3.h5", 3000)
    assert fall_back(CheckpointStorage(tmp_path)) == 2
    assert "model.v3.h5 is damaged: its checksum" in caplog.text and "going on from version 2" in caplog.text
    assert holds(tmp_path, 2)
    assert (tmp_path / "damaged_v3" / "v3" / "model.v3.h5").is_file()
    assert not (tmp_path / "epoch_3").exists()
    assert open_checkpoint(tmp_path / "damaged_v3" / "epoch_3").version == 3  # still beside its version
    assert save(tmp_path, 4, "epoch_3") == 3
    assert holds(tmp_path, 4) and holds(tmp_path / "epoch_1", 1)
    # A second one keeps what the first has moved aside.
    flip(tmp_path / "v3" / "model.v3.h5", 3000)
    damaged = [(tmp_path / folder / "model.v3.h5").read_bytes() for folder in ("damaged_v3/v3", "v3")]
    assert fall_back(CheckpointStorage(tmp_path)) == 2 and holds(tmp_path, 2)
    for folder, content in zip(("damaged_v3", "damaged_v3_2"), damaged):
        assert (tmp_path / folder / "v3" / "model.v3.h5").read_bytes() == content
        assert (tmp_path / folder / "epoch_3").is_file()


def test_fallback_where_nothing_is_damaged_or_nothing_is_whole(tmp_path):
    assert fall_back(CheckpointStorage(tmp_path)) is None
    save(tmp_path, 1)
    assert fall_back(CheckpointStorage(tmp_path)) is None
    os.truncate(tmp_path / "v1" / "model.v1.h5", 100)
    with pytest.raises(CheckpointError, match="model.v1.h5 is damaged: it has 100 bytes.*no version in the"):
        fall_back(CheckpointStorage(tmp_path))
    assert (tmp_path / "v1" / "model.v1.h5").is_file()
