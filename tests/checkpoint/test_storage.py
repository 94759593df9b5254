"""What is atomic about the folder, and which files may be removed when."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from pathlib import Path

import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.errors import CheckpointError, StorageError
from tests.checkpoint.test_faults import run
from tests.checkpoint.toy_checkpoint import holds, save_alone, save_toy, saved_toy, toy_meta, toy_tables


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def versions(folder, *numbers):
    """Make folders of versions, and files of others beside them."""
    for number in numbers:
        (folder / f"v{number}").mkdir()
        for name in (f"model.v{number}.h5", "manifest.json", "config.json.tmp"):
            (folder / f"v{number}" / name).touch()
    for name in ("notes.txt", "mine.tmp"):
        (folder / name).touch()
    (folder / "vocabulary").mkdir()


def test_versions_go_that_nobody_needs(tmp_path, caplog):
    """Other programs' files stay, and all versions while a pointer is damaged."""
    versions(tmp_path, 1, 2, 3, 4)
    storage, foreign = CheckpointStorage(tmp_path), ["mine.tmp", "notes.txt"]
    (tmp_path / "best").write_text("{")
    storage.drop_older(3)
    assert names_in(tmp_path) == ["best", *foreign, "v1", "v2", "v3", "v4", "vocabulary"]
    assert "a pointer to one is damaged" in caplog.text
    storage.write_json("best", {"version": 1, "checksum": "f00d"})
    storage.drop_older(3)
    assert names_in(tmp_path) == ["best", *foreign, "v1", "v3", "v4", "vocabulary"]
    # What an interrupted save left.
    storage.drop_unpublished(3)
    assert names_in(tmp_path) == ["best", *foreign, "v1", "v3", "vocabulary"]


def test_a_new_file_appears_whole_or_not_at_all(tmp_path):
    storage = CheckpointStorage(tmp_path)
    storage.write_text("x.txt", "old")
    with storage.new_file("x.txt") as path:
        assert path.name == "x.txt.tmp"
        path.write_text("new")
        assert (tmp_path / "x.txt").read_text() == "old"
    assert (tmp_path / "x.txt").read_text() == "new"
    with pytest.raises(ZeroDivisionError), storage.new_file("x.txt") as path:
        path.write_text("half")
        raise ZeroDivisionError
    assert (tmp_path / "x.txt").read_text() == "new"
    assert names_in(tmp_path) == ["x.txt"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    real_replace, real_fsync = os.replace, os.fsync

    def replace(source, target):
        events.append("rename")
        real_replace(source, target)

    def fsync(descriptor):
        events.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "fsync", fsync)
    CheckpointStorage(tmp_path).publish(4)
    # The last one is the link for people.
    assert events == ["sync checkpoint_version.txt.tmp", "rename", f"sync {tmp_path.name}", "rename"]
    assert os.readlink(tmp_path / "latest") == "v4"
    assert (tmp_path / "checkpoint_version.txt").read_text() == "4\n"


def test_prepare_says_that_nothing_counts_yet(tmp_path):
    storage = CheckpointStorage(tmp_path / "a" / "b")
    assert storage.published_version() == 0
    storage.prepare()
    assert (tmp_path / "a" / "b" / "checkpoint_version.txt").read_text() == "0\n"
    assert storage.published_version() == 0 and storage.published() is None
    storage.publish(7)
    storage.prepare()
    assert (tmp_path / "a" / "b" / "checkpoint_version.txt").read_text() == "7\n"


def save_with_little_room(path, meta, tables, max_file_bytes):
    """Save where no file may grow beyond a size, as on a full disk, then with room; 0 if all is well."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, hard))
    try:
        save_alone(path, meta, tables)
    except StorageError as error:
        message = str(error)
    else:
        os._exit(3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    whole = open_checkpoint(path)
    whole.verify()
    no_leavings = not list(path.rglob("*.tmp"))
    good = "cannot write " in message and whole.version == 1 and no_leavings
    os._exit(0 if good and save_alone(path, meta, tables) == 2 else 4)


@pytest.mark.parametrize("max_file_bytes", [1, 1000, 6000, 16000, 25000])
def test_no_room_on_the_disk(tmp_path, max_file_bytes):
    meta = toy_meta(num_people=300)
    first, second = toy_tables(meta, 1), toy_tables(meta, 2)
    save_alone(tmp_path, meta, first)
    assert run(save_with_little_room, tmp_path, meta, second, max_file_bytes) == 0
    assert holds(tmp_path, meta, {2: second}) == 2


@pytest.mark.parametrize(
    "number, kind", [(errno.EDQUOT, StorageError), (errno.EIO, StorageError), (errno.EROFS, CheckpointError)]
)
def test_a_disk_that_fails_to_rename_is_no_bad_input(tmp_path, monkeypatch, number, kind):
    """Status 2, with which nothing is started again, is for what the user has to mend."""
    saved_toy(tmp_path)
    storage = CheckpointStorage(tmp_path)

    def failing(*_arguments, **_options):
        raise OSError(number, os.strerror(number))

    (tmp_path / "v9").mkdir()
    (tmp_path / "v9" / "manifest.json").touch()
    monkeypatch.setattr(os, "replace", failing)
    monkeypatch.setattr(os, "mkdir", failing)
    monkeypatch.setattr(Path, "unlink", failing)
    for work in (
        lambda: storage.drop_unpublished(1),
        lambda: storage.damaged_folder(2),
    ):
        with pytest.raises(kind, match=f"cannot write to {re.escape(str(tmp_path))}: {os.strerror(number)}$"):
            work()


def test_a_version_counts_although_older_files_stay(tmp_path, monkeypatch, caplog):
    """The disk fails after the version was published: the save is done, and the next one cleans up."""
    meta, tables = saved_toy(tmp_path)

    def failing(path, **_options):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", failing)
        save_toy(tmp_path, meta, tables)
    assert "version 2 is published, but older files" in caplog.text and "Input/output error" in caplog.text
    assert open_checkpoint(tmp_path).version == 2
    assert (tmp_path / "v1" / "model.v1.h5").exists()
    save_toy(tmp_path, meta, tables)
    assert open_checkpoint(tmp_path).version == 3
    assert names_in(tmp_path) == ["checkpoint_version.txt", "latest", "v3"]
