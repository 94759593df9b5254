"""One file: rows written in any order, mapped, and described."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from dglkge.checkpoint import hdf5_format, part_files, storage
from dglkge.errors import CheckpointError
from tests.checkpoint.toy_checkpoint import toy_meta


def test_chunked_and_compressed_rows_are_read(tmp_path):
    """Other writers may choose so; there is then nothing to map."""
    path = tmp_path / "x.h5"
    rows = np.random.default_rng(0).random((50, 4), dtype=np.float32)
    with hdf5_format.create(path, {}) as file:
        file.create_dataset("rows", data=rows, chunks=(7, 4), compression="gzip")
    with hdf5_format.open_file(path) as file:
        assert np.array_equal(hdf5_format.map_rows(path, file["rows"]), rows)


def test_checksum_of_a_file(tmp_path):
    for size in (0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_000_000):
        content = np.random.default_rng(size).bytes(size)
        (tmp_path / "x").write_bytes(content)
        assert storage.file_crc32(tmp_path / "x") == zlib.crc32(content)


def test_plain_state_is_taken_before_the_blob(tmp_path):
    path = tmp_path / "x.h5"
    with hdf5_format.create(path, {}) as file:
        group = file.create_group("optimizer")
        group["sum"] = np.arange(3.0)
        hdf5_format.write_blob(group, {"state": {0: {"sum": torch.zeros(3)}}, "param_groups": []})
    with hdf5_format.open_file(path) as file:
        state = part_files.read_state(path, file, "person", toy_meta())
        assert list(state) == ["sum"] and np.array_equal(state["sum"][:], np.arange(3.0))


@pytest.mark.parametrize("blob", [[1, 2], {"state": [0]}])
def test_a_blob_that_is_no_state(tmp_path, blob):
    path = tmp_path / "x.h5"
    with hdf5_format.create(path, {}) as file:
        hdf5_format.write_blob(file.create_group("optimizer"), blob)
    with hdf5_format.open_file(path) as file, pytest.raises(CheckpointError) as caught:
        part_files.read_state(path, file, "person", toy_meta())
    assert str(caught.value) == f"{path}:/optimizer/{hdf5_format.STATE_BLOB}: not the state of an optimizer"


def test_no_state_at_all(tmp_path):
    path = tmp_path / "x.h5"
    with hdf5_format.create(path, {}):
        pass
    with hdf5_format.open_file(path) as file:
        assert part_files.read_state(path, file, "person", toy_meta()) == {}
    with hdf5_format.create(path, {}) as file:
        hdf5_format.write_blob(file.create_group("optimizer"), {"state": {}, "param_groups": []})
    with hdf5_format.open_file(path) as file:
        assert part_files.read_state(path, file, "person", toy_meta()) == {}
