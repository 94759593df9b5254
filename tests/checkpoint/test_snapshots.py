"""Kept versions: epoch_{E}/ and best/, which outlive newer ones, moves of the folder and killed saves."""

from __future__ import annotations

import os
import shutil

import pytest

from dglkge.checkpoint import CheckpointManager, open_checkpoint, snapshots
from dglkge.checkpoint.manager import fall_back
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.errors import CheckpointError
from dglkge.inference.run import open_run
from dglkge.typing import RELATION
from tests.checkpoint.test_damage import flip
from tests.checkpoint.toy_checkpoint import cut, toy_meta, toy_names, toy_tables


def save(path, seed, *names):
    """Save the toy's tables of a seed, kept under some names."""
    meta = toy_meta()
    tables = toy_tables(meta, seed)
    manager = CheckpointManager(path, 0, True, lambda: None, toy_names(meta))
    parts = [cut("person", tables["person"], 1)[0]]
    return manager.save(parts, cut(RELATION, tables[RELATION], 1)[0], meta, {name: {} for name in names})


def holds(path, seed):
    """Check that a checkpoint is whole and has the tables of a seed."""
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    for table, whole in toy_tables(toy_meta(), seed).items():
        assert checkpoint[table][:].numpy().tobytes() == whole.rows.numpy().tobytes()
    return checkpoint


def test_a_snapshot_is_a_checkpoint_and_stays(tmp_path):
    for seed in (1, 2, 3, 4):
        save(tmp_path / "a", seed, *(["epoch_2"] if seed == 2 else []))
    assert {path.name for path in (tmp_path / "a").glob("*.v*")} == {
        f"{name}.v{version}.{kind}"
        for version in (2, 4)
        for name, kind in (("embeddings_person_0", "h5"), ("model", "h5"), ("manifest", "json"))
    }
    shutil.move(tmp_path / "a", tmp_path / "b")
    kept = holds(tmp_path / "b" / "epoch_2", 2)
    assert kept.version == 2 and kept.vocabulary("person")[3] == "person-3"
    assert os.readlink(tmp_path / "b" / "epoch_2" / "model.v2.h5") == os.path.join("..", "model.v2.h5")
    assert (tmp_path / "b" / "epoch_2" / "checkpoint_version.txt").read_text() == "2\n"
    assert not (tmp_path / "b" / "epoch_2" / "checkpoint_version.txt").is_symlink()
    assert (tmp_path / "b" / "epoch_2" / "entity_names_person_0.json").is_file()
    assert holds(tmp_path / "b", 4).version == 4


def test_inspect_verifies_kept_versions(tmp_path):
    """A flipped bit in any file of a version that only snapshots need is found."""
    for seed in (1, 2, 3):
        save(tmp_path / "checkpoint", seed, *(["epoch_1"] if seed == 1 else []))
    run = open_run(tmp_path)
    assert run.inspect(verify=True)["verified"]
    kept = sorted((tmp_path / "checkpoint").glob("*.v1.h5"))
    assert len(kept) == 2
    for path in kept:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=path.name):
            run.inspect(verify=True)
        path.write_bytes(content)


def test_what_biggraph_writes_in_place_does_not_reach_a_snapshot(tmp_path):
    """It truncates config.json and appends to training_stats.json when it resumes a run."""
    save(tmp_path, 1, "epoch_1")
    with open(tmp_path / "config.json", "r+") as file:
        file.truncate(0)
        file.write("{}")
    holds(tmp_path / "epoch_1", 1)
    with pytest.raises(CheckpointError, match="config.json is damaged: it has 2 bytes"):
        open_checkpoint(tmp_path)


def test_the_best_is_replaced_by_a_better_one_only(tmp_path):
    manager = CheckpointManager(tmp_path, 0, True, lambda: None)
    kept = []
    for seed, score in enumerate([0.2, 0.5, 0.3, 0.5, 0.6]):
        save(tmp_path, seed)
        assert not manager.keep_best(float("nan"), {})  # also as the first score
        kept.append(manager.keep_best(score, {"finished_epochs": seed + 1}))
    assert kept == [True, True, False, False, True]
    assert holds(tmp_path / "best", 4).version == 5
    assert snapshots.read_note(tmp_path, "best") == {"version": 5, "score": 0.6, "finished_epochs": 5}
    save(tmp_path, 9)
    assert {path.name for path in tmp_path.glob("model*")} == {"model.v5.h5", "model.v6.h5"}


def test_what_an_interrupted_snapshot_leaves_is_mended(tmp_path):
    save(tmp_path, 1, "epoch_1")
    save(tmp_path, 2, "best")
    os.replace(tmp_path / "best", tmp_path / "best.old")  # killed between the two renames
    (tmp_path / "best.tmp").mkdir()
    (tmp_path / "theirs.tmp").mkdir()  # of another program
    (tmp_path / "theirs.tmp" / "work.txt").write_text("x")
    shutil.copytree(tmp_path / "epoch_1", tmp_path / "epoch_1.old", symlinks=True)
    (tmp_path / "epoch_9").mkdir()  # of a version that never counted
    (tmp_path / "epoch_9" / "model.v3.h5").symlink_to("../model.v3.h5")
    save(tmp_path, 3)
    found = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert found == ["best", "epoch_1", "theirs.tmp"]
    assert (tmp_path / "theirs.tmp" / "work.txt").read_text() == "x"
    assert holds(tmp_path / "epoch_1", 1) and holds(tmp_path / "best", 2) and holds(tmp_path, 3)


def test_fallback_takes_the_newest_good_version(tmp_path, caplog):
    save(tmp_path, 1, "epoch_1")
    save(tmp_path, 2, "epoch_2")
    save(tmp_path, 3, "epoch_3")
    flip(tmp_path / "model.v3.h5", 3000)
    assert fall_back(CheckpointStorage(tmp_path)) == 2
    assert "model.v3.h5 is damaged: its checksum" in caplog.text and "going on from version 2" in caplog.text
    assert holds(tmp_path, 2)
    assert (tmp_path / "damaged_v3" / "model.v3.h5").is_file()
    assert not (tmp_path / "epoch_3").exists()
    assert (tmp_path / "damaged_v3" / "epoch_3" / "model.v3.h5").is_file()  # its links still lead somewhere
    assert save(tmp_path, 4) == 3
    assert holds(tmp_path, 4) and holds(tmp_path / "epoch_1", 1)


def test_a_second_fallback_keeps_what_the_first_moved_aside(tmp_path):
    save(tmp_path, 1, "epoch_1")
    damaged = []
    for seed in (2, 3):
        save(tmp_path, seed, "epoch_2")
        flip(tmp_path / "model.v2.h5", 3000)
        damaged.append((tmp_path / "model.v2.h5").read_bytes())
        assert fall_back(CheckpointStorage(tmp_path)) == 1
    for folder, content in zip(("damaged_v2", "damaged_v2_2"), damaged):
        assert (tmp_path / folder / "model.v2.h5").read_bytes() == content
        assert (tmp_path / folder / "epoch_2" / "model.v2.h5").read_bytes() == content
    assert holds(tmp_path, 1)


@pytest.mark.parametrize("content", ["", "seven", "9", None])
def test_fallback_with_a_damaged_version_file(tmp_path, content):
    save(tmp_path, 1, "epoch_1")
    save(tmp_path, 2)
    path = tmp_path / "checkpoint_version.txt"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(CheckpointError, match="newest good version is 2: set checkpoint.fallback=true"):
        CheckpointStorage(tmp_path).published()
    assert fall_back(CheckpointStorage(tmp_path)) == 2
    assert holds(tmp_path, 2)
    assert not list(tmp_path.glob("damaged*"))


def test_fallback_where_nothing_is_damaged_or_nothing_is_whole(tmp_path):
    assert fall_back(CheckpointStorage(tmp_path)) is None
    save(tmp_path, 1)
    assert fall_back(CheckpointStorage(tmp_path)) is None
    os.truncate(tmp_path / "model.v1.h5", 100)
    with pytest.raises(CheckpointError, match="model.v1.h5 is damaged: it has 100 bytes.*no version in the"):
        fall_back(CheckpointStorage(tmp_path))
    assert (tmp_path / "model.v1.h5").is_file()
