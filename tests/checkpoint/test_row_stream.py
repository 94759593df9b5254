"""Rows brought into a file block by block: their order, the checksum, and what goes wrong on the way."""

from __future__ import annotations

import os
import threading
import zlib

import h5py
import numpy as np
import pytest
import torch

from dglkge.checkpoint import hdf5_format
from dglkge.checkpoint import part_files as row_stream


@pytest.fixture
def small_blocks(monkeypatch):
    """Cut rows into blocks of 100 bytes, and read what lies between in pieces as small."""
    monkeypatch.setattr(hdf5_format.row_blocks, "__defaults__", (100,))
    monkeypatch.setattr(hdf5_format, "BLOCK_BYTES", 100)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (7, 2, 2)),
        (torch.float64, (7, 3)),
        (torch.float16, (7, 3)),
        (torch.float16, (0, 3)),
        (torch.int64, (7,)),
        (torch.uint8, (0,)),
    ],
)
def test_rows_of_any_kind(tmp_path, dtype, shape):
    values = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1))
    path = tmp_path / "x.h5"
    with hdf5_format.create(path, {"note": "here", "count": 7}) as file:
        hdf5_format.allocate_rows(file, "rows", values)
    assert row_stream.fill_rows(path, {"rows": values}, order) == zlib.crc32(path.read_bytes())
    with hdf5_format.open_file(path) as file:
        assert dict(file.attrs) == {"format_version": 1, "note": "here", "count": 7}
        mapped = hdf5_format.map_rows(path, file["rows"])
    expected = values[order].numpy()
    if dtype == torch.float16:  # files have no numbers of 16 bits: float32 holds each of them
        expected = expected.astype(np.float32)
    assert mapped.dtype == expected.dtype and mapped.shape == shape
    assert isinstance(mapped, np.memmap) == (mapped.size > 0)
    assert mapped.tobytes() == expected.tobytes()


def test_rows_that_want_gradients_or_are_views(tmp_path):
    memory = torch.rand(9, 8)
    values = memory[1:6, 2:5].requires_grad_()
    order = torch.tensor([4, 0, 3, 1, 2])
    with hdf5_format.create(tmp_path / "x.h5", {}) as file:
        hdf5_format.allocate_rows(file, "a/rows", values)
    row_stream.fill_rows(tmp_path / "x.h5", {"a/rows": values}, order)
    with hdf5_format.open_file(tmp_path / "x.h5") as file:
        assert np.array_equal(file["a/rows"][:], memory[1:6, 2:5].detach()[order].numpy())


def test_many_blocks_of_several_tables(tmp_path, small_blocks, monkeypatch):
    """The disk is slower than what puts rows in order: no block may be overwritten before it is written."""
    tables = {
        "first": torch.rand(57, 6),
        "group/ids": torch.arange(57),
        "empty": torch.empty(57, 0),
        "last": torch.rand(57, 2, 2),
    }
    order, path, real = torch.randperm(57), tmp_path / "x.h5", os.pwrite

    def slow(descriptor, block, place):
        threading.Event().wait(0.002)
        return real(descriptor, block[: max(1, len(block) // 2)], place)  # a disk may also take only a part

    monkeypatch.setattr(os, "pwrite", slow)
    with hdf5_format.create(path, {"note": "x" * 1000}) as file:
        for name, values in tables.items():
            hdf5_format.allocate_rows(file, name, values)
            file[f"between_{len(name)}_{name.replace('/', '_')}"] = np.arange(300)
    checksum = row_stream.fill_rows(path, tables, order)
    assert checksum == zlib.crc32(path.read_bytes())
    with h5py.File(path) as file:
        for name, values in tables.items():
            assert np.array_equal(file[name][...], values[order].numpy())


@pytest.mark.parametrize("block", [0, 3])
def test_a_full_disk_is_told(tmp_path, small_blocks, monkeypatch, block):
    values, path, real, places = torch.rand(40, 5), tmp_path / "x.h5", os.pwrite, []

    def full(*arguments):
        places.append(arguments[2])
        if len(places) > block:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    with hdf5_format.create(path, {}) as file:
        hdf5_format.allocate_rows(file, "rows", values)
    monkeypatch.setattr(os, "pwrite", full)
    before = threading.active_count()
    with pytest.raises(OSError, match="No space left on device"):
        row_stream.fill_rows(path, {"rows": values}, torch.arange(40))
    assert threading.active_count() == before


def test_a_disk_that_takes_no_advice(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    monkeypatch.setattr(row_stream, "ADVICE_BYTES", 1)
    values = torch.rand(9, 2)
    with hdf5_format.create(tmp_path / "x.h5", {}) as file:
        hdf5_format.allocate_rows(file, "rows", values)
    row_stream.fill_rows(tmp_path / "x.h5", {"rows": values}, torch.arange(9))
    with h5py.File(tmp_path / "x.h5") as file:
        assert np.array_equal(file["rows"][...], values.numpy())
