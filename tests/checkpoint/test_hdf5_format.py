"""One file: rows written in any order and block by block, mapped and described; optimizer state."""

from __future__ import annotations

import functools
import io
import os
import pickle
import re
import threading
import zlib
from unittest import mock

import h5py
import numpy as np
import pytest
import torch

from dglkge.checkpoint import hdf5_format, part_files, storage
from dglkge.errors import CheckpointError
from tests.checkpoint.toy_checkpoint import META


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.h5"


def write(path, tables, order, **attributes):
    """Write tables in an order; return the checksum."""
    with hdf5_format.create(path, attributes) as file:
        for name, values in tables.items():
            hdf5_format.allocate_rows(file, name, values)
            file[f"between_{len(name)}_{name.replace('/', '_')}"] = np.arange(300)
    return part_files.fill_rows(path, tables, order)


@pytest.mark.parametrize(("dtype", "shape"), [
    (torch.float32, (7, 2, 2)), (torch.float64, (7, 3)), (torch.float16, (7, 3)),
    (torch.float16, (0, 3)), (torch.int64, (7,)), (torch.uint8, (0,)),
])  # fmt: skip
def test_rows_of_any_kind(path, dtype, shape):
    values = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1))
    assert write(path, {"rows": values}, order, note="here", count=7) == zlib.crc32(path.read_bytes())
    with hdf5_format.open_file(path) as file:
        assert dict(file.attrs) == {"format_version": 1, "note": "here", "count": 7}
        mapped = hdf5_format.map_rows(path, file["rows"])
    expected = values[order].numpy()
    if dtype == torch.float16:  # files have no numbers of 16 bits: float32 holds each of them
        expected = expected.astype(np.float32)
    assert mapped.dtype == expected.dtype and mapped.shape == shape
    assert isinstance(mapped, np.memmap) == (mapped.size > 0)
    assert mapped.tobytes() == expected.tobytes()


def test_many_blocks_of_several_tables(path, monkeypatch):
    """No block may be overwritten before a slow disk has written it, also where that takes no advice."""
    monkeypatch.setattr(os, "posix_fadvise", mock.Mock(side_effect=OSError(22, "Invalid argument")))
    monkeypatch.setattr(part_files, "ADVICE_BYTES", 1)
    monkeypatch.setattr(hdf5_format.row_blocks, "__defaults__", (100,))
    monkeypatch.setattr(hdf5_format, "BLOCK_BYTES", 100)  # pieces of what lies between are as small
    tables = {
        "first": torch.rand(57, 6),
        "wider_than_a_block": torch.rand(57, 40),
        "group/ids": torch.arange(57),
        "empty": torch.empty(57, 0),
        "view/with_gradients": torch.rand(60, 8)[2:59, 2:5].requires_grad_(),
        "last": torch.rand(57, 2, 2),
    }
    order, real = torch.randperm(57), os.pwrite

    def slow(descriptor, block, place):
        threading.Event().wait(0.002)
        return real(descriptor, block[: max(1, len(block) // 2)], place)  # a disk may also take only a part

    monkeypatch.setattr(os, "pwrite", slow)
    assert write(path, tables, order, note="x" * 1000) == zlib.crc32(path.read_bytes())
    with h5py.File(path) as file:
        for name, values in tables.items():
            assert np.array_equal(file[name][...], values.detach()[order].numpy())


def test_chunked_and_compressed_rows_are_read(path):
    """Other writers may choose so; there is then nothing to map."""
    rows = np.random.default_rng(0).random((50, 4), dtype=np.float32)
    with hdf5_format.create(path, {}) as file:
        file.create_dataset("rows", data=rows, chunks=(7, 4), compression="gzip")
    with hdf5_format.open_file(path) as file:
        assert np.array_equal(hdf5_format.map_rows(path, file["rows"]), rows)


def test_checksum_of_a_file(path):
    for size in (0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_000_000):
        content = np.random.default_rng(size).bytes(size)
        path.write_bytes(content)
        assert storage.file_crc32(path) == zlib.crc32(content)


def test_hdf5_files_that_are_not_of_the_format(path):
    for make, words in [
        (lambda: None, "x.h5 is missing"),
        (lambda: path.write_bytes(b"no hdf5"), "x.h5 is damaged or not an HDF5 file: "),
        (lambda: h5py.File(path, "w").close(), "x.h5: format_version is None; this dglkge reads 1"),
    ]:
        make()
        with pytest.raises(CheckpointError, match=re.escape(words)), hdf5_format.open_file(path):
            pass
    with hdf5_format.create(path, {}):
        pass
    with pytest.raises(CheckpointError, match="x.h5: a dataset is missing"):
        with hdf5_format.open_file(path) as file:
            file["embeddings"]


def state_of(path, write_state=lambda group: None):
    """Write the state of an optimizer, and read it."""
    with hdf5_format.create(path, {}) as file:
        write_state(file.create_group("optimizer"))
    with hdf5_format.open_file(path) as file:
        state = part_files.read_state(path, file, "person", META)
        return {name: values[:] for name, values in state.items()}


def blob(content):
    return lambda group: hdf5_format.write_blob(group, content)


def test_plain_state_is_taken_before_the_blob(path):
    def write_both(group):
        group["sum"] = np.arange(3.0)
        hdf5_format.write_blob(group, {"state": {0: {"sum": torch.zeros(3)}}, "param_groups": []})

    state = state_of(path, write_both)
    assert list(state) == ["sum"] and np.array_equal(state["sum"], np.arange(3.0))
    assert state_of(path) == {}
    assert state_of(path, blob({"state": {}, "param_groups": []})) == {}


class Hostile:
    """Unpickling this would make a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


@pytest.mark.parametrize("save", [functools.partial(pickle.dump, protocol=2), torch.save])
def test_a_hostile_pickle_is_refused(path, tmp_path, save):
    with io.BytesIO() as buffer:
        save({"state": {0: {"sum": Hostile(tmp_path / "pwned")}}}, buffer)
        content = np.frombuffer(buffer.getvalue(), dtype="V1")
    words = "x.h5:/optimizer/state_dict: refused, it holds more than tensors and plain values"
    with pytest.raises(CheckpointError, match=words):
        state_of(path, lambda group: group.create_dataset("state_dict", data=content))
    assert not (tmp_path / "pwned").exists()


def test_a_blob_that_is_no_state(path):
    def cut_off(group):
        hdf5_format.write_blob(group, {"state": {0: {"sum": torch.ones(3)}}})
        content = group["state_dict"][:]
        del group["state_dict"]
        group["state_dict"] = content[: len(content) // 2]

    no_state = "x.h5:/optimizer/state_dict: not the state of an optimizer"
    for write_state, words in [
        (blob([1, 2]), no_state), (blob({"state": [0]}), no_state), (cut_off, "or is damaged"),
    ]:  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            state_of(path, write_state)
