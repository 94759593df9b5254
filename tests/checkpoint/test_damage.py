"""A checkpoint that is missing, foreign, cut off or garbled is an error that says what to do."""

from __future__ import annotations

import errno
import io
import os
import pickle
import re

import h5py
import numpy as np
import pytest
import torch

from dglkge.checkpoint import CheckpointManager, hdf5_format, open_checkpoint, part_files
from dglkge.checkpoint import storage as storage_module
from dglkge.errors import CheckpointError
from tests.checkpoint.toy_checkpoint import save_alone, save_toy, saved_toy, toy_meta, toy_tables


@pytest.fixture
def folder(tmp_path):
    """A run's checkpoint at version 2, of two parts."""
    meta, _ = saved_toy(tmp_path, 2)
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
NO_ADVICE = "no version in the folder is whole; move the folder away to start anew"
FIRST = "embeddings_person_0.v2.h5"


def version_file(content):
    return lambda folder: (folder / "checkpoint_version.txt").write_bytes(content)


def manifest(change):
    def damage(folder):
        path = folder / "v2" / "manifest.json"
        path.write_text(change(path.read_text()))

    return damage


def renamed(folder):
    (folder / "v2").rename(folder / "v3")
    version_file(b"3\n")(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (version_file(b"1.5\n"), f"checkpoint_version.txt reads '1.5'; expected one number; {ADVICE}"),
        (version_file(b"9" * 5000), f"reads '{'9' * 40}'; expected one number; {ADVICE}"),
        (
            version_file(b"5\n"),
            f"v5/manifest.json is missing: half-written, or not written by dglkge; {ADVICE}",
        ),
        (lambda folder: (folder / "v2" / FIRST).unlink(), f"{FIRST} is missing; {NO_ADVICE}"),
        (
            manifest(lambda text: text.replace('"seed": 3', '"seed": 4')),
            "v2/manifest.json: damaged: its checksum does not match its text",
        ),
        (manifest(lambda text: text[:100]), "v2/manifest.json: not a manifest of dglkge, or damaged ("),
        (manifest(lambda text: "[1, 2]"), "v2/manifest.json: not a manifest of dglkge, or damaged ("),
        (
            manifest(lambda text: text.replace('"manifest_version": 3', '"manifest_version": 4')),
            "v2/manifest.json: manifest version 4; this dglkge reads 3",
        ),
        (renamed, "v3/manifest.json is damaged: it describes version 2"),
    ],
)
def test_damaged_folders(folder, damage, words):
    damage(folder)
    refused(folder, words)


@pytest.mark.parametrize("old", [b"0\n", b"1\n"])
def test_version_file_of_long_ago(folder, old):
    """Nothing may be started anew over a version that is whole."""
    saved_toy(folder)
    version_file(old)(folder)
    refused(folder, f"reads '{old.decode().strip()}', but a newer version lies beside it; the newest good")


def test_a_version_that_was_whole_but_never_published_does_not_count(tmp_path):
    meta, _ = saved_toy(tmp_path)
    (tmp_path / "checkpoint_version.txt").write_text("0\n")
    assert CheckpointManager(tmp_path).latest() is None
    assert save_toy(tmp_path, meta, toy_tables(meta)) == 1


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
    meta = toy_meta()
    with pytest.raises(CheckpointError, match="cannot write to .*file/checkpoint: Not a directory"):
        save_toy(tmp_path / "file" / "checkpoint", meta, toy_tables(meta))


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
        part_files.read_state(tmp_path / "x.h5", file, "person", toy_meta())
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
        part_files.read_state(tmp_path / "x.h5", file, "person", toy_meta())


def test_a_disk_that_fails_to_read_is_damage_like_any_other(tmp_path, monkeypatch):
    """The error of the system ended the fallback, though an older version was whole."""
    meta = toy_meta()
    for version in (1, 2):
        assert save_alone(tmp_path, meta, toy_tables(meta), f"epoch_{version}") == version
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
    CheckpointManager(tmp_path).fall_back()
    assert open_checkpoint(tmp_path).version == 1
