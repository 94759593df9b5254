"""Names to ids: hash tables over bytes, filled by several threads, and the sorted names as a compact list."""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dglkge.data.triples import string_buffers
from dglkge.errors import InputError
from dglkge.kernels import hashing

MAX_NAMES = np.iinfo(np.int32).max

SHARD_BITS = 4
"""Of a hash, for the table that a name is in: each has a lock, so as many threads can add names."""

NUM_WORDS = 4
"""Numbers of eight bytes that names are sorted by before Arrow compares them."""

_NAMES_AT_A_TIME = 1 << 18

Strings: typing.TypeAlias = pa.StringArray | pa.LargeStringArray


class NameList(Sequence[str]):
    """A list of names in Arrow's layout: 8 bytes each and those of the names, a sixth of Python's strings."""

    def __init__(self, array: Strings) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, place: int) -> str:  # type: ignore[override]
        return self.array[place].as_py()

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self.array), _NAMES_AT_A_TIME):
            yield from self.array[start : start + _NAMES_AT_A_TIME].to_pylist()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def take(self, places: np.ndarray) -> NameList:
        """Return the names at some places."""
        return NameList(self.array.take(pa.array(places)))

    def save(self, path: Path) -> None:
        """Write one name per line, as :meth:`dglkge.data.vocabulary.Vocabulary.save` does."""
        end, nothing = (pa.scalar(text, self.array.type) for text in ("\n", ""))
        with open(path, "wb") as file:
            for start in range(0, len(self.array), _NAMES_AT_A_TIME):
                names = self.array[start : start + _NAMES_AT_A_TIME]
                offsets, data = string_buffers(pc.binary_join_element_wise(names, end, nothing))
                file.write(data[offsets[0] : offsets[-1]].data)


def name_list(names: Sequence[str]) -> NameList:
    """Return names as a list of Arrow's."""
    return names if isinstance(names, NameList) else NameList(pa.array(names, pa.large_string()))


class NameIndex:
    """A growing index of names; threads may add to it at the same time.

    An id is an arbitrary number: :meth:`in_order` returns the place of each among the sorted names, which
    does not depend on the order in which names were added. There are ``2 ** shard_bits`` tables, each with a
    lock. With 0, ids count from 0 in the order of the names' first appearance.
    """

    def __init__(self, shard_bits: int = SHARD_BITS) -> None:
        self._bits = shard_bits
        # Of their own in each index, so that nobody can write a file of different names with equal hashes.
        self._keys = np.frombuffer(os.urandom(16), np.uint64)
        self._tables = [_Table(self._bits, self._keys) for _ in range(1 << self._bits)]

    def add(self, names: Strings) -> np.ndarray:
        """Return the ids of names, (n,) int32; new names get new ids. Too many are an InputError."""
        offsets, data = string_buffers(names)
        hashes = hashing.hash_names(offsets, data, self._keys)
        rows, starts, num_bytes = hashing.group_by_low_bits(hashes, offsets, self._bits)
        ids = np.empty(len(names), np.int32)
        for shard in np.flatnonzero(np.diff(starts)).tolist():
            mine = rows[starts[shard] : starts[shard + 1]]
            self._tables[shard].add(mine, int(num_bytes[shard]), (hashes, offsets, data), shard, ids)
        return ids

    def in_order(self) -> tuple[NameList, np.ndarray]:
        """Return the sorted names, and the place of each id among them, int32; the index is given up.

        Sorted, so that ids do not depend on the order of the triples nor on where chunks end.
        """
        counts = [table.num for table in self._tables]
        ids = np.concatenate([(np.arange(count) << self._bits) | shard for shard, count in enumerate(counts)])
        names = pa.concat_arrays([table.names() for table in self._tables])
        self._tables.clear()
        ordered, places_of_names = in_order(names)
        places = np.empty(int(ids.max(initial=-1)) + 1, np.int32)
        places[ids] = places_of_names
        return ordered, places


class _Table:
    """A hash table of names."""

    def __init__(self, bits: int, keys: np.ndarray) -> None:
        self._bits, self._keys = bits, keys
        self._lock, self.num = Lock(), 0
        self._slots = np.zeros((64, 2), np.uint64)
        self._offsets, self._data = np.zeros(32, np.int64), np.zeros(256, np.uint8)

    def add(
        self, rows: np.ndarray, num_bytes: int, hashed: tuple[np.ndarray, ...], shard: int, ids: np.ndarray
    ) -> None:
        """Look up and add the names of some rows, of so many bytes in all: see ``hashing.intern_names``."""
        with self._lock:
            self._make_room(len(rows), num_bytes)
            table = self._slots, (self._offsets, self._data), self.num
            self.num = hashing.intern_names(rows, hashed, self._bits, shard, *table, ids)
            if self.num << self._bits > MAX_NAMES:
                raise InputError(f"there are more than {MAX_NAMES} names")

    def _make_room(self, num_names: int, num_bytes: int) -> None:
        """Make room as if all the names were new."""
        used = int(self._offsets[self.num])
        self._offsets = _grown(self._offsets, self.num + num_names + 1, self.num + 1)
        self._data = _grown(self._data, used + num_bytes, used)
        num_slots = len(self._slots)
        while 3 * (self.num + num_names) > 2 * num_slots:
            num_slots *= 2
        if num_slots > len(self._slots):
            self._slots = np.zeros((num_slots, 2), np.uint64)
            hashes = hashing.hash_names(self._offsets[: self.num + 1], self._data, self._keys)
            hashing.fill_slots(hashes, self._bits, self._slots)

    def names(self) -> pa.LargeStringArray:
        """Return the names by number."""
        return pa.LargeStringArray.from_buffers(self.num, *map(pa.py_buffer, (self._offsets, self._data)))


def _grown(array: np.ndarray, length: int, used: int) -> np.ndarray:
    """Return an array of at least a length; larger by half than needed, so that copies are few."""
    if length <= len(array):
        return array
    grown = np.zeros(length + length // 2, array.dtype)
    grown[:used] = array[:used]
    return grown


def in_order(names: Strings) -> tuple[NameList, np.ndarray]:
    """Return different names sorted by code points, and the place of each among them, (n,) int32.

    UTF-8 sorts as its code points do. Most names differ in a few bytes behind those that all share: these are
    compared as numbers, and Arrow compares the texts of names that are equal there.
    """
    order = np.arange(len(names))
    if len(names):
        offsets, data = string_buffers(names)
        skip = hashing.shared_prefix(offsets, data)
        starts = range(skip, skip + 8 * NUM_WORDS, 8)
        words = {f"word at {start}": hashing.words_of(offsets, data, start) for start in starts}
        rows = pa.table({**words, "name": names})
        indices = pc.sort_indices(rows, [(column, "ascending") for column in rows.column_names])
        order = indices.to_numpy().view(np.int64)
    places = np.empty(len(order), np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    return NameList(names).take(order), places
