"""Reading the files of a dataset: arrays, JSON and the fingerprint."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from dglkge.data.dataset_files import fingerprint, load_json, split_path, vocabulary_path
from dglkge.data.partition_layout import load_array
from dglkge.errors import InputError


def test_paths(tmp_path):
    assert vocabulary_path(tmp_path, "person") == tmp_path / "entities" / "person.txt"
    assert split_path(tmp_path, "valid") == tmp_path / "valid.npy"


@pytest.mark.parametrize("shape", [(0,), (0, 3), (5, 3)])
def test_array_is_mapped_read_only(tmp_path, shape):
    np.save(tmp_path / "a.npy", np.zeros(shape, np.int64))
    array = load_array(tmp_path / "a.npy", (None, *shape[1:]), np.int64)
    assert array.shape == shape and not array.flags.writeable


@pytest.mark.parametrize("shape", [(5,), (4, 3), (5, 3, 1), (None, 2)])
def test_array_of_another_shape(tmp_path, shape):
    np.save(tmp_path / "a.npy", np.zeros((5, 3), np.int64))
    with pytest.raises(InputError, match=r"a.npy holds an array \(5, 3\) of int64, expected"):
        load_array(tmp_path / "a.npy", shape, np.int64)


@pytest.mark.parametrize("content", [b"", b"not an array", b"\x93NUMPY\x01\x00"])
def test_what_is_no_array(tmp_path, content):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(InputError, match="a.npy"):
        load_array(tmp_path / "a.npy", (None,), np.int64)


@pytest.mark.parametrize(
    "content, message", [("{", "cut off or no JSON"), ("3", "holds int, expected a JSON object")]
)
def test_what_is_no_json_object(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match=message):
        load_json(tmp_path / "a.json")


def test_json_of_other_bytes(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="a.json is cut off or no JSON"):
        load_json(tmp_path / "a.json")
    with pytest.raises(InputError, match="cannot read .*b.json: No such file"):
        load_json(tmp_path / "b.json")


def test_fingerprint_is_of_names_sizes_and_contents(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"12")
    second.write_bytes(b"3")
    expected = hashlib.sha256(b"a:2\n12b:1\n3").hexdigest()
    assert fingerprint([first, second]) == expected
    # the boundary between two files counts
    first.write_bytes(b"1")
    second.write_bytes(b"23")
    assert fingerprint([first, second]) != expected
    assert fingerprint([second, first]) != fingerprint([first, second])
