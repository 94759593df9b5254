"""A checkpoint that is missing, foreign, cut off or garbled is an error that says what to do."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import pickle
import re

import h5py
import numpy as np
import pytest
import torch

from dglkge.checkpoint import CheckpointManager, hdf5_format, open_checkpoint
from dglkge.checkpoint import storage as storage_module
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.errors import CheckpointError
from tests.checkpoint.toy_checkpoint import blank, cut, save_toy, toy_meta, toy_tables


@pytest.fixture
def folder(tmp_path):
    """A run's checkpoint at version 2, of two parts."""
    meta = toy_meta()
    save_toy(tmp_path, meta, toy_tables(meta), 2)
    save_toy(tmp_path, meta, toy_tables(meta), 2)
    return tmp_path


def refused(path, text):
    """Check that reading, resuming and saving all refuse, with the same words."""
    meta = toy_meta()
    manager = CheckpointManager(path)
    before = sorted(os.listdir(path))
    for action in (
        lambda: open_checkpoint(path),
        manager.latest,
        lambda: manager.restore([]),
        lambda: save_toy(path, meta, toy_tables(meta)),
    ):
        with pytest.raises(CheckpointError, match=re.escape(text)):
            action()
    assert sorted(os.listdir(path)) == before


ADVICE = "the newest good version is 2: set checkpoint.fallback=true to go on from it"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "checkpoint_version.txt is empty; expected one number; " + ADVICE),
        ("\n", "checkpoint_version.txt is empty"),
        ("seven\n", "checkpoint_version.txt reads 'seven'; expected one number; " + ADVICE),
        ("-1\n", "reads '-1'"),
        ("1.5\n", "reads '1.5'"),
        ("9" * 5000 + "\n", f"reads '{'9' * 40}'; expected one number; " + ADVICE),
        ("5\n", "v5/manifest.json is missing: half-written, or not written by dglkge; " + ADVICE),
    ],
)
def test_version_file(folder, content, words):
    (folder / "checkpoint_version.txt").write_text(content)
    refused(folder, words)


def test_version_file_is_gone(folder):
    (folder / "checkpoint_version.txt").unlink()
    refused(folder, "checkpoint_version.txt is missing, but files of a checkpoint lie beside it; " + ADVICE)


@pytest.mark.parametrize("old", ["0\n", "1\n"])
def test_version_file_of_long_ago(folder, old):
    """Nothing may be started anew over a version that is whole."""
    meta = toy_meta()
    save_toy(folder, meta, toy_tables(meta))
    (folder / "checkpoint_version.txt").write_text(old)
    words = (
        f"checkpoint_version.txt reads {old.strip()!r}, but a newer version lies beside it; the newest good"
    )
    refused(folder, words)


def test_a_version_that_was_whole_but_never_published_does_not_count(tmp_path):
    meta = toy_meta()
    save_toy(tmp_path, meta, toy_tables(meta))
    (tmp_path / "checkpoint_version.txt").write_text("0\n")
    assert CheckpointManager(tmp_path).latest() is None
    assert save_toy(tmp_path, meta, toy_tables(meta)) == 1


def test_binary_version_file(folder):
    (folder / "checkpoint_version.txt").write_bytes(b"\xff\x00\xfe")
    refused(folder, "checkpoint_version.txt reads ")


@pytest.mark.parametrize("name", ["embeddings_person_1.v2.h5", "model.v2.h5"])
def test_a_file_is_gone(folder, name):
    (folder / "v2" / name).unlink()
    refused(
        folder, f"{name} is missing; no version in the folder is whole; move the folder away to start anew"
    )


def test_a_file_is_cut_off(folder):
    path = folder / "v2" / "embeddings_person_0.v2.h5"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    refused(folder, f"embeddings_person_0.v2.h5 is damaged: it has {size - 1} bytes, expected {size}")


def flip(path, place):
    """Change one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def test_a_flipped_bit(folder):
    name = "embeddings_person_0.v2.h5"
    with h5py.File(folder / "v2" / name) as file:
        place = file["embeddings"].id.get_offset() + 5
    flip(folder / "v2" / name, place)
    words = f"{name} is damaged: its checksum is not the one in the manifest"
    with pytest.raises(CheckpointError, match=re.escape(words)):
        open_checkpoint(folder).verify()
    meta = toy_meta()
    live = blank(cut("person", toy_tables(meta)["person"], 1)[0])
    with pytest.raises(CheckpointError, match=re.escape(words)):
        CheckpointManager(folder).restore([live])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda text: text.replace('"seed": 3', '"seed": 4'),
            "damaged: its checksum does not match its text",
        ),
        (lambda text: text[:100], "not a manifest of dglkge, or damaged ("),
        (lambda text: "", "not a manifest of dglkge, or damaged ("),
        (lambda text: "[1, 2]", "not a manifest of dglkge, or damaged ("),
        (lambda text: '{"name": "other"}', "not a manifest of dglkge, or damaged ("),
        (
            lambda text: text.replace('"manifest_version": 3', '"manifest_version": 4'),
            "manifest version 4; this dglkge reads 3",
        ),
    ],
)
def test_manifest(folder, change, words):
    path = folder / "v2" / "manifest.json"
    path.write_text(change(path.read_text()))
    refused(folder, f"v2/manifest.json: {words}")


def test_manifest_of_another_version(folder):
    (folder / "v2").rename(folder / "v3")
    (folder / "checkpoint_version.txt").write_text("3\n")
    refused(folder, "v3/manifest.json is damaged: it describes version 2")


def test_the_newest_good_version_is_the_newest_whole_one(folder, tmp_path):
    storage = CheckpointStorage(folder)
    assert storage.newest_good() == 2
    for version in (7, 9):
        (folder / f"v{version}").mkdir()
    (folder / "v7" / "manifest.json").write_text("{}")
    (folder / "v9" / "embeddings_person_0.v9.h5").write_bytes(b"")
    assert storage.newest_good() == 2
    flip(folder / "v2" / "embeddings_person_0.v2.h5", 3000)
    assert storage.newest_good() is None


def test_foreign_checkpoint(tmp_path):
    (tmp_path / "checkpoint_version.txt").write_text("4\n")
    with h5py.File(tmp_path / "embeddings_all_0.v4.h5", "w") as file:
        file["embeddings"] = np.zeros((3, 2), np.float32)
    refused(
        tmp_path,
        "v4/manifest.json is missing: half-written, or not written by dglkge; no version in the folder",
    )


def test_paths_that_are_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere does not exist; expected the folder of a run"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is not a folder; expected the folder of a run"):
        open_checkpoint(tmp_path / "file")
    with pytest.raises(CheckpointError, match="file is not a folder"):
        CheckpointManager(tmp_path / "file").latest()
    with pytest.raises(CheckpointError, match="holds no checkpoint: no version of it was ever completed"):
        open_checkpoint(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    meta = toy_meta()
    with pytest.raises(CheckpointError, match="cannot write to .*file/checkpoint: Not a directory"):
        save_toy(tmp_path / "file" / "checkpoint", meta, toy_tables(meta))


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "embeddings.h5").write_text("mine")
    meta = toy_meta()
    for _ in range(2):
        save_toy(tmp_path, meta, toy_tables(meta))
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "embeddings.h5").read_text() == "mine"


def test_hdf5_files_that_are_not_of_the_format(tmp_path):
    path = tmp_path / "x.h5"
    for write, words in [
        (lambda: None, "x.h5 is missing"),
        (lambda: path.write_bytes(b"no hdf5"), "x.h5 is damaged or not an HDF5 file: "),
        (lambda: h5py.File(path, "w").close(), "x.h5: format_version is None; this dglkge reads 1"),
    ]:
        write()
        with pytest.raises(CheckpointError, match=re.escape(words)), hdf5_format.open_file(path):
            pass
    with h5py.File(path, "w") as file:
        file.attrs["format_version"] = 1
    with (
        pytest.raises(CheckpointError, match="x.h5: a dataset is missing"),
        hdf5_format.open_file(path) as file,
    ):
        file["embeddings"]


class Hostile:
    """Unpickling this would make a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


@pytest.mark.parametrize("plain_pickle", [True, False])
def test_a_hostile_pickle_is_refused(tmp_path, plain_pickle):
    target = tmp_path / "pwned"
    with io.BytesIO() as buffer:
        payload = {"state": {0: {"sum": Hostile(target)}}}
        if plain_pickle:
            pickle.dump(payload, buffer, protocol=2)
        else:
            torch.save(payload, buffer)
        blob = np.frombuffer(buffer.getvalue(), dtype="V1")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["format_version"] = 1
        file.create_dataset("optimizer/state_dict", data=blob)
    with (
        hdf5_format.open_file(tmp_path / "x.h5") as file,
        pytest.raises(
            CheckpointError,
            match="x.h5:/optimizer/state_dict: refused, it holds more than tensors and plain values",
        ),
    ):
        hdf5_format.read_state(file)
    assert not target.exists()


def test_a_cut_blob_is_refused(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["format_version"] = 1
        group = file.create_group("optimizer")
        hdf5_format.write_blob(group, {"state": {0: {"sum": torch.ones(3)}}})
        whole = group["state_dict"][:]
        del group["state_dict"]
        group["state_dict"] = whole[: len(whole) // 2]
    with (
        hdf5_format.open_file(tmp_path / "x.h5") as file,
        pytest.raises(CheckpointError, match="or is damaged"),
    ):
        hdf5_format.read_state(file)


def test_state_that_only_the_blob_holds(tmp_path):
    """So PyTorch-BigGraph writes it."""
    sums = torch.rand(4)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["format_version"] = 1
        hdf5_format.write_blob(
            file.create_group("optimizer"),
            {"state": {0: {"sum": sums, "step": torch.tensor(3)}}, "param_groups": []},
        )
    with hdf5_format.open_file(tmp_path / "x.h5") as file:
        state = hdf5_format.read_state(file)
    assert list(state) == ["sum"]
    assert np.array_equal(state["sum"], sums.numpy())


def test_the_manifest_tells_the_whole_run(folder):
    text = json.loads((folder / "v2" / "manifest.json").read_text())
    assert text["version"] == 2
    assert text["meta"]["dataset_fingerprint"] == "f00d"
    assert text["meta"]["progress"] == {"finished_epochs": 2, "batches_done": 17, "global_batch_size": 100}
    assert [(entry["name"], entry["size_bytes"]) for entry in text["files"]] == [
        (name, (folder / "v2" / name).stat().st_size)
        for name in ("embeddings_person_0.v2.h5", "embeddings_person_1.v2.h5", "model.v2.h5")
    ]
    shapes = text["files"][0]["shapes"]
    assert len(shapes.pop("optimizer/state_dict")) == 1
    assert shapes == {
        "embeddings": [12, 6],
        "optimizer/sum": [12, 6],
        "original_ids": [12],
    }


def test_a_disk_that_fails_to_read_is_damage_like_any_other(tmp_path, monkeypatch):
    """The error of the system ended the fallback, though an older version was whole."""
    meta = toy_meta()
    manager = CheckpointManager(tmp_path)
    tables = toy_tables(meta)
    parts = [cut(name, tables[name], 1)[0] for name in meta.entity_types]
    for version in (1, 2):
        kept = {f"epoch_{version}": {}}
        assert manager.save(parts, cut("relation", tables["relation"], 1)[0], meta, kept) == version
        meta = dataclasses.replace(meta, progress={**meta.progress, "finished_epochs": version})
    bad = tmp_path / "v2" / "embeddings_person_0.v2.h5"
    real = storage_module.file_crc32

    def failing(file):
        place = os.stat(file) if isinstance(file, os.PathLike) else os.fstat(file.fileno())
        if os.path.samestat(place, bad_place):
            raise OSError(errno.EIO, "Input/output error")
        return real(file)

    bad_place = os.stat(bad)
    monkeypatch.setattr(storage_module, "file_crc32", failing)
    with pytest.raises(CheckpointError, match=f"cannot read {re.escape(str(bad))}: Input/output error"):
        open_checkpoint(tmp_path).verify()
    manager.fall_back()
    assert open_checkpoint(tmp_path).version == 1
