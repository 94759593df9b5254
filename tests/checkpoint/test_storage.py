"""What is atomic about the folder, and which files may be removed when."""

from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path

import pytest

from dglkge.checkpoint import layout, open_checkpoint
from dglkge.checkpoint.courier import empty_outbox
from dglkge.checkpoint.manifest import FileEntry
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.errors import CheckpointError, StorageError
from tests.checkpoint.test_faults import run, save_alone
from tests.checkpoint.toy_checkpoint import save_toy, toy_meta, toy_tables


def touch(folder, *names):
    """Make files without content."""
    for name in names:
        (folder / name).write_bytes(b"")


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


VERSIONS = [
    "embeddings_a_0.v1.h5",
    "embeddings_a_0.v2.h5",
    "embeddings_a_0.v3.h5",
    "embeddings_a_0.v3.h5.tmp",
    "embeddings_a_0.v2.h5.tmp",
    "manifest.v1.json",
    "manifest.v2.json",
    "manifest.v3.json.tmp",
    "model.v1.h5",
    "model.v2.h5",
    "model.v3.h5",
    "model.v3.h5.receipt.json",
    "entity_names_a_0.json",
    "notes.txt",
]


def test_older_versions_go(tmp_path):
    touch(tmp_path, *VERSIONS)
    CheckpointStorage(tmp_path).drop_older(3)
    assert names_in(tmp_path) == [
        "embeddings_a_0.v3.h5",
        "embeddings_a_0.v3.h5.tmp",
        "entity_names_a_0.json",
        "manifest.v3.json.tmp",
        "model.v3.h5",
        "model.v3.h5.receipt.json",
        "notes.txt",
    ]


def test_leavings_of_an_interrupted_save_go(tmp_path):
    touch(tmp_path, *VERSIONS)
    CheckpointStorage(tmp_path).drop_unpublished(2)
    assert names_in(tmp_path) == [
        "embeddings_a_0.v1.h5",
        "embeddings_a_0.v2.h5",
        "entity_names_a_0.json",
        "manifest.v1.json",
        "manifest.v2.json",
        "model.v1.h5",
        "model.v2.h5",
        "notes.txt",
    ]


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
    assert events == ["sync checkpoint_version.txt.tmp", "rename", f"sync {tmp_path.name}"]
    assert (tmp_path / "checkpoint_version.txt").read_text() == "4\n"


def test_the_version_is_published_after_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    order = []
    real_replace = os.replace

    def replace(source, target):
        order.append(os.path.basename(target))
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    save_alone(tmp_path, toy_meta(), toy_tables(toy_meta()))
    assert order[0] == order[-1] == "checkpoint_version.txt"
    assert order[-2] == "manifest.v1.json"
    assert {"embeddings_person_0.v1.h5", "model.v1.h5", "vocabulary_person.txt"} < set(order[1:-2])


def test_receipts(tmp_path):
    storage = CheckpointStorage(tmp_path)
    entries = [
        FileEntry(name, "a", part, 5, 100, 1, 2, {"embeddings": [5, 3]})
        for part, name in enumerate([layout.embeddings_file("a", 0, 2), layout.embeddings_file("a", 1, 2)])
    ]
    for one in entries:
        storage.write_receipt(one)
    touch(tmp_path, "embeddings_a_0.v1.h5.receipt.json", "embeddings_a_0.v12.h5.receipt.json")
    assert storage.read_receipts(2) == entries
    storage.remove_receipts(2)
    assert names_in(tmp_path) == ["embeddings_a_0.v1.h5.receipt.json", "embeddings_a_0.v12.h5.receipt.json"]


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
    no_leavings = not list(path.glob("*.tmp"))
    good = "cannot write " in message and whole.version == 1 and no_leavings
    os._exit(0 if good and save_alone(path, meta, tables) == 2 else 4)


@pytest.mark.parametrize("max_file_bytes", [1, 100, 1000, 3000, 6000, 9000, 16000, 20000, 25000])
def test_no_room_on_the_disk(tmp_path, max_file_bytes):
    meta = toy_meta(num_people=300)
    first, second = toy_tables(meta, 1), toy_tables(meta, 2)
    save_alone(tmp_path, meta, first)
    assert run(save_with_little_room, tmp_path, meta, second, max_file_bytes) == 0
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.verify()
    assert checkpoint.version == 2
    assert checkpoint["person"][:].numpy().tobytes() == second["person"].rows.numpy().tobytes()


@pytest.mark.parametrize(
    "number, kind", [(errno.EDQUOT, StorageError), (errno.EIO, StorageError), (errno.EROFS, CheckpointError)]
)
def test_a_disk_that_fails_to_rename_is_no_bad_input(tmp_path, monkeypatch, number, kind):
    """Status 2, with which nothing is started again, is for what the user has to mend."""
    meta = toy_meta()
    save_toy(tmp_path, meta, toy_tables(meta))
    storage = CheckpointStorage(tmp_path)
    manifest = storage.published()

    def failing(*_arguments, **_options):
        raise OSError(number, os.strerror(number))

    (tmp_path / "model.v9.h5").touch()
    monkeypatch.setattr(os, "replace", failing)
    monkeypatch.setattr(os, "mkdir", failing)
    monkeypatch.setattr(Path, "unlink", failing)
    for work in (
        lambda: storage.withdraw_texts(1, ()),
        lambda: storage.place_texts(manifest),
        lambda: storage.drop_unpublished(1),
        lambda: storage.damaged_folder(2),
    ):
        with pytest.raises(kind, match=f"cannot write to {re.escape(str(tmp_path))}: {os.strerror(number)}$"):
            work()
    with pytest.raises(kind, match=f"outbox_1: {os.strerror(number)}$"):
        empty_outbox(tmp_path / "checkpoint", 1)


def test_a_version_counts_although_older_files_stay(tmp_path, monkeypatch, caplog):
    """The disk fails after the version was published: the save is done, and the next one cleans up."""
    meta = toy_meta()
    tables = toy_tables(meta)
    save_toy(tmp_path, meta, tables)
    unlink = Path.unlink

    def failing(path, missing_ok=False):
        if ".v1." in path.name or path.name.endswith(layout.RECEIPT_SUFFIX):
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing)
        save_toy(tmp_path, meta, tables)
    assert "version 2 is published, but older files" in caplog.text and "Input/output error" in caplog.text
    assert open_checkpoint(tmp_path).version == 2
    assert (tmp_path / "model.v1.h5").exists()
    save_toy(tmp_path, meta, tables)
    assert open_checkpoint(tmp_path).version == 3
    assert not [name for name in names_in(tmp_path) if ".v1." in name or ".v2." in name]
