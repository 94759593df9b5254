"""Names to ids by hash tables: against Python's dict and sort."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.data.triples import string_buffers
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError
from dglkge.kernels.hashing import hash_names
from dglkge.partition import name_index
from dglkge.partition.name_index import NameIndex, NameList, sorted_order

# Zeros, names that begin alike, and letters of several bytes.
NAME = st.text("ab\0é語😀", max_size=20).map("http://example.org/".__add__) | st.text(min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(blocks=st.lists(st.lists(NAME, max_size=30), min_size=1, max_size=5), bits=st.sampled_from([0, 1, 6]))
def test_names_lead_back_and_are_sorted(blocks, bits):
    index = NameIndex(bits)
    ids = [index.add(pa.array(block, pa.string())) for block in blocks]
    names, places = index.in_order()
    assert names == sorted({name for block in blocks for name in block})
    for block, found in zip(blocks, ids):
        assert [names[place] for place in places[found].tolist()] == block


@settings(max_examples=60, deadline=None)
@given(names=st.lists(NAME, unique=True, max_size=60), rounds=st.sampled_from([1, 2, 32]))
def test_order_is_that_of_code_points(names, rounds):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name_index, "MAX_ROUNDS", rounds)
        order = sorted_order(pa.array(names, pa.large_string()))
    assert [names[place] for place in order.tolist()] == sorted(names)


@settings(max_examples=60, deadline=None)
@given(names=st.lists(NAME, unique=True, min_size=1, max_size=60))
def test_each_of_the_two_hashes_tells_names_apart(names: list[str]) -> None:
    offsets, data = string_buffers(pa.array(names, pa.large_string()))
    hashes = hash_names(offsets, data, np.array([3, 5], np.uint64))
    assert np.array_equal(hashes, hash_names(offsets, data, np.array([3, 5], np.uint64)))
    everything = np.concatenate([hashes, hash_names(offsets, data, np.array([4, 6], np.uint64))], axis=1)
    assert [len(np.unique(one)) for one in everything.T] == 4 * [len(names)]
    assert not (everything[:, :2] == everything[:, 2:]).any()


def test_words_in_another_order_have_other_hashes() -> None:
    words = ["abcdefgh", "ijklmnop", "qrstuvwx", "\0" * 8]
    names = ["".join(order) for size in range(5) for order in itertools.permutations(words, size)]
    offsets, data = string_buffers(pa.array([*names, "\0", "a", "a\0"], pa.large_string()))
    hashes = hash_names(offsets, data, np.zeros(2, np.uint64))
    assert [len(np.unique(one)) for one in hashes.T] == 2 * [len(names) + 3]


@pytest.mark.parametrize("which", [0, 1])
def test_names_of_equal_hashes_are_told_apart(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(offsets: np.ndarray, data: np.ndarray, keys: np.ndarray) -> np.ndarray:
        hashes = hash_names(offsets, data, keys)
        hashes[:, which] = 0
        return hashes

    monkeypatch.setattr(name_index, "hash_names", half)
    index, given_names = NameIndex(), [f"e{i % 50}" for i in range(200)]
    ids = index.add(pa.array(given_names))
    names, places = index.in_order()
    assert [names[place] for place in places[ids].tolist()] == given_names


def test_threads_may_add_at_the_same_time() -> None:
    rng = np.random.default_rng(1)
    blocks = [[f"n{i}" for i in rng.integers(0, 3000, 4000).tolist()] for _ in range(12)]
    index = NameIndex()
    with ThreadPoolExecutor(4) as threads:
        ids = list(threads.map(lambda block: index.add(pa.array(block)), blocks))
    names, places = index.in_order()
    assert names == sorted({name for block in blocks for name in block})
    for block, found in zip(blocks, ids):
        assert [names[place] for place in places[found].tolist()] == block


def test_slices_of_arrow_arrays() -> None:
    index = NameIndex(0)
    assert index.add(pa.array(["a", "b", "c", "b"])[1:]).tolist() == [0, 1, 0]
    assert index.add(pa.array(["c", "d"], pa.large_string())[1:]).tolist() == [2]
    assert index.in_order()[0] == ["b", "c", "d"]


def test_too_many_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_index, "MAX_NAMES", 2)
    with pytest.raises(InputError, match="there are more than 2 names"):
        NameIndex(0).add(pa.array(["a", "b", "c"]))


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b\u2028c", "é"]])
def test_a_list_of_names_is_saved_as_a_vocabulary_is(names: list[str], tmp_path: Path) -> None:
    found = NameList(pa.array(["x", *names], pa.large_string()))[1:]
    assert found == names and names == found and found != [*names, "z"]
    assert list(found) == names and [found[i] for i in range(len(found))] == names
    found.save(tmp_path / "one")
    Vocabulary(names, "entity").save(tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    assert found.take(np.arange(len(names))[::-1]) == names[::-1]
    assert found.has_byte(ord("b")) == any("b" in name for name in names)
    # The name before the slice does not count.
    assert not found.has_byte(ord("x"))
