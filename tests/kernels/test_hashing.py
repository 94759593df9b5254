"""SplitMix64 in Python's integers, keys and uniform draws; names to ids against a dict and a sort."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dglkge.data.triples import string_buffers
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError
from dglkge.kernels import hashing
from dglkge.kernels.hashing import GOLDEN_GAMMA, below, column_bits, combine, row_keys, stream_key, words
from dglkge.partition import name_index
from dglkge.partition.name_index import NameIndex, NameList, in_order

MASK = (1 << 64) - 1


def reference_split_mix(state: int) -> int:
    """Steele, Lea and Flood 2014, figure 16, in Python's integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_equals_reference() -> None:
    """The function, the stream of seed 0 as every implementation of SplitMix64 gives it, keys and words."""
    states = [0, 1, 12345, 2**63, MASK]
    mixed = hashing.split_mix(np.array(states, np.uint64))
    assert mixed.tolist() == list(map(reference_split_mix, states))
    bits = column_bits(np.zeros(1, np.uint64), 3)
    assert bits.tolist() == [[0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]]
    key, gamma = stream_key(1, "person"), int(GOLDEN_GAMMA)
    keys = row_keys(key, np.array([0, 7]))
    assert keys.tolist() == [reference_split_mix((int(key[0]) + id_ * gamma) & MASK) for id_ in (0, 7)]
    assert int(column_bits(keys, 4)[1, 2]) == reference_split_mix((int(keys[1]) + 3 * gamma) & MASK)
    other = combine(7, -3, 2**63)
    counters = np.array([0, 1, 2, 12345, 2**40])
    states = [(counter * gamma + other) & MASK for counter in counters.tolist()]
    assert words(other, counters).tolist() == list(map(reference_split_mix, states))


def test_keys_differ_and_do_not_depend_on_the_kind_of_integer() -> None:
    parts = [(1, "a"), (2, "a"), (1, "b"), (12, "a"), (1, "2a"), ("a", 1)]
    assert len({int(stream_key(*words)[0]) for words in parts}) == 6
    assert stream_key(np.int64(5), "a") == stream_key(5, "a")
    assert len({combine(*parts) for parts in [(1, 2), (2, 1), (1, 2, 0), (1,), (0, 1, 2), (1, 3)]}) == 6


def test_below_is_the_upper_half_of_a_product() -> None:
    for limit in (1, 3, 1000, 3 * 2**29, 2**31 + 1, 2**32 - 1, 2**32, 7 * 2**33 + 5, 2**63):
        key = combine(5, limit)
        drawn = words(key, np.arange(2000)).tolist()
        assert below(key, 2000, limit).tolist() == [word * limit >> 64 for word in drawn]


# Zeros, names that begin alike, and letters of several bytes.
NAME = st.text("ab\0é語😀", max_size=20).map("http://example.org/".__add__) | st.text(min_size=1, max_size=12)


def check_names(index: NameIndex, blocks: list[list[str]], block_ids: list[np.ndarray]) -> None:
    names, places = index.in_order()
    assert names == sorted({name for block in blocks for name in block})
    for block, ids in zip(blocks, block_ids):
        assert [names[place] for place in places[ids].tolist()] == block


@settings(max_examples=60)
@given(blocks=st.lists(st.lists(NAME, max_size=30), min_size=1, max_size=5), bits=st.sampled_from([0, 1, 6]))
def test_names_lead_back_and_are_sorted(blocks, bits):
    index = NameIndex(bits)
    check_names(index, blocks, [index.add(pa.array(block, pa.string())) for block in blocks])


@settings(max_examples=60)
@given(names=st.lists(NAME, unique=True, max_size=60), num_words=st.sampled_from([1, 2, 4]))
def test_order_is_that_of_code_points(names, num_words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name_index, "NUM_WORDS", num_words)
        ordered, places = in_order(pa.array(names, pa.large_string()))
    assert list(ordered) == sorted(names) and [ordered[place] for place in places.tolist()] == names


def hashes_of(names: list[str], *keys: int) -> np.ndarray:
    return hashing.hash_names(*string_buffers(pa.array(names, pa.large_string())), np.array(keys, np.uint64))


WORDS = ["abcdefgh", "ijklmnop", "qrstuvwx", "\0" * 8]
ORDERS = ["".join(order) for size in range(5) for order in itertools.permutations(WORDS, size)]


@settings(max_examples=60)
@given(names=st.lists(NAME, unique=True, min_size=1, max_size=60))
@example(names=[*ORDERS, "\0", "a", "a\0"])
def test_each_of_the_two_hashes_tells_names_apart(names: list[str]) -> None:
    hashes, others, equal = hashes_of(names, 3, 5), hashes_of(names, 4, 6), hashes_of(names, 0, 0)
    assert np.array_equal(hashes, hashes_of(names, 3, 5)) and not (hashes == others).any()
    columns = (*hashes.T, *others.T, *equal.T)
    assert [len(np.unique(column)) for column in columns] == 6 * [len(names)]


@pytest.mark.parametrize("which", [0, 1])
def test_names_of_equal_hashes_are_told_apart(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hash_names = hashing.hash_names

    def half(offsets: np.ndarray, data: np.ndarray, keys: np.ndarray) -> np.ndarray:
        hashes = hash_names(offsets, data, keys)
        hashes[:, which] = 0
        return hashes

    monkeypatch.setattr(hashing, "hash_names", half)
    index, names = NameIndex(), [f"e{i % 50}" for i in range(200)]
    check_names(index, [names], [index.add(pa.array(names))])


def test_threads_may_add_at_the_same_time() -> None:
    rng, index = np.random.default_rng(1), NameIndex()
    blocks = [[f"n{i}" for i in rng.integers(0, 3000, 4000).tolist()] for _ in range(12)]
    with ThreadPoolExecutor(4) as threads:
        ids = list(threads.map(lambda block: index.add(pa.array(block)), blocks))
    check_names(index, blocks, ids)


def test_slices_of_arrow_arrays_and_too_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    index = NameIndex(0)
    assert index.add(pa.array(["a", "b", "c", "b"])[1:]).tolist() == [0, 1, 0]
    assert index.add(pa.array(["c", "d"], pa.large_string())[1:]).tolist() == [2]
    assert index.in_order()[0] == ["b", "c", "d"]
    monkeypatch.setattr(name_index, "MAX_NAMES", 2)
    with pytest.raises(InputError, match="there are more than 2 names"):
        NameIndex(0).add(pa.array(["a", "b", "c"]))


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b\u2028c", "é"]])
def test_a_list_of_names_is_saved_as_a_vocabulary_is(names: list[str], tmp_path: Path) -> None:
    names_read = NameList(pa.array(["x", *names], pa.large_string())[1:])
    assert names_read == names and names == names_read and names_read != [*names, "z"]
    assert list(names_read) == names and [names_read[i] for i in range(len(names_read))] == names
    names_read.save(tmp_path / "one")
    Vocabulary(names, "entity").save(tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    assert names_read.take(np.arange(len(names))[::-1]) == names[::-1]
