"""What is atomic about the folder, which files may be removed when, and that two jobs never mix in it."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest

from dglkge.checkpoint import layout
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.distributed.lease import LEASE_FILE, Holder, Lease, LeaseTaker, new_nonce
from dglkge.errors import CheckpointError, StorageError
from tests.checkpoint.toy_checkpoint import save_seed


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_names_of_files():
    for version in (1, 12, 10**17):
        assert layout.parse_version_folder(layout.version_folder(version)) == version
    for name in ("v", "version", "v1.tmp", "vv1", "v-1", "1", "latest", "v" + "9" * 19):
        assert layout.parse_version_folder(name) is None
    pointers = {layout.BEST, layout.epoch_pointer(7)}
    for name in (*pointers, "best.tmp", "epoch_", "epoch_x", "epoch_1.old", "v7", "latest"):
        assert layout.is_pointer(name) is (name in pointers)
    for name in ("config.json", "config.json.tmp", "config.json.0123456789abcdeg.tmp", "config.json.012.tmp"):
        assert not layout.is_temporary_of_a_job(name)


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
    storage = CheckpointStorage(tmp_path)
    storage.publish(4)
    # The last one is the link for people.
    assert events == ["sync checkpoint_version.txt.tmp", "rename", f"sync {tmp_path.name}", "rename"]
    assert os.readlink(tmp_path / "latest") == "v4"
    with pytest.raises(ZeroDivisionError), storage.new_file("checkpoint_version.txt") as path:
        path.write_text("half")
        raise ZeroDivisionError
    storage.prepare()
    assert (tmp_path / "checkpoint_version.txt").read_text() == "4\n"
    assert names_in(tmp_path) == ["checkpoint_version.txt", "latest"]


@pytest.mark.parametrize(
    "number, kind", [(errno.EDQUOT, StorageError), (errno.EIO, StorageError), (errno.EROFS, CheckpointError)]
)
def test_a_disk_that_fails_to_rename_is_no_bad_input(tmp_path, monkeypatch, number, kind):
    """Status 2, with which nothing is started again, is for what the user has to mend."""
    save_seed(tmp_path, 0)
    storage, error = CheckpointStorage(tmp_path), OSError(number, os.strerror(number))
    (tmp_path / "v9").mkdir()
    (tmp_path / "v9" / "manifest.json").touch()
    for module, name in ((os, "replace"), (os, "mkdir"), (Path, "unlink")):
        monkeypatch.setattr(module, name, mock.Mock(side_effect=error))
    for work in (lambda: storage.drop_unpublished(1), lambda: storage.damaged_folder(2)):
        with pytest.raises(kind, match=f"cannot write to {re.escape(str(tmp_path))}: {os.strerror(number)}$"):
            work()


def test_a_version_counts_although_older_files_stay(tmp_path, caplog):
    """The disk fails after the version was published: the save is done, and the next one cleans up."""
    save_seed(tmp_path, 0)
    with mock.patch.object(shutil, "rmtree", side_effect=OSError(errno.EIO, "Input/output error")):
        save_seed(tmp_path, 0)
    assert "version 2 is published, but older files" in caplog.text and "Input/output error" in caplog.text
    assert open_checkpoint(tmp_path).version == 2
    assert (tmp_path / "v1" / "model.v1.h5").exists()
    save_seed(tmp_path, 0)
    assert open_checkpoint(tmp_path).version == 3
    assert names_in(tmp_path) == ["checkpoint_version.txt", "latest", "v3"]


@pytest.fixture
def lease(tmp_path: Path):
    taken = LeaseTaker(tmp_path, new_nonce()).take()
    yield taken
    taken.release()


@pytest.mark.parametrize("step", range(1, 9))
def test_the_lease_is_read_before_every_file_takes_its_place(tmp_path, lease, monkeypatch, step):
    """Whenever it is lost: the newest version is whole, and no file of the other job is replaced."""

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.glob("checkpoint/**/*") if path.is_file()}

    save_seed(tmp_path / "checkpoint", 1, lease=lease)
    before, real, calls = contents(), Lease.check, []

    def check(self):
        calls.append(1)
        if len(calls) == step:  # a job on another host has it: this one was suspended for too long
            other = dataclasses.replace(Holder.this_process(new_nonce(), "", "trainer"), host="elsewhere")
            (tmp_path / LEASE_FILE).write_bytes(other.to_bytes())
        real(self)

    monkeypatch.setattr(Lease, "check", check)
    with pytest.raises(CheckpointError, match=r"lost its lease on .*: it is held by trainer \(pid .* on els"):
        save_seed(tmp_path / "checkpoint", 2, lease=lease)
    assert contents() == before or step > 1
    assert open_checkpoint(tmp_path, verify=True).version == 1


def test_temporary_files_have_the_jobs_name_and_those_of_dead_jobs_go(tmp_path, lease):
    folder = tmp_path / "checkpoint"
    storage = CheckpointStorage(folder, lease)
    storage.prepare()
    with storage.new_file("model.v1.h5") as path:
        path.write_text("x")
        assert path.name == f"model.v1.h5.{lease.nonce}.tmp"
    files = ("model.v2.h5", "config.json", "entity_names_a.json")
    abandoned = {f"{name}.{new_nonce()}.tmp" for name in files}
    for name in [*abandoned, "mine.tmp"]:
        (folder / name).touch()
    save_seed(tmp_path / "checkpoint", 1, lease=lease)
    names = set(names_in(folder))
    assert not names & abandoned and "mine.tmp" in names
