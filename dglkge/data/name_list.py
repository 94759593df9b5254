"""A list of names that takes little memory. Apart from the vocabularies, because it needs pyarrow."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_NAMES_AT_A_TIME = 1 << 18

Strings: typing.TypeAlias = pa.StringArray | pa.LargeStringArray


class NameList(Sequence[str]):
    """A list of names in Arrow's layout: 8 bytes each and those of the names, a sixth of Python's strings.

    Parameters
    ----------
    array : pyarrow.LargeStringArray
        Without nulls.
    """

    def __init__(self, array: pa.LargeStringArray) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    @typing.overload
    def __getitem__(self, place: int) -> str: ...

    @typing.overload
    def __getitem__(self, place: slice) -> NameList: ...

    def __getitem__(self, place: int | slice) -> str | NameList:
        if isinstance(place, slice):
            return NameList(self.array[place])
        name: str = self.array[place].as_py()
        return name

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self.array), _NAMES_AT_A_TIME):
            yield from self.array[start : start + _NAMES_AT_A_TIME].to_pylist()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NameList):
            return bool(self.array.equals(other.array))
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def take(self, places: np.ndarray) -> NameList:
        """Return the names at some places."""
        return NameList(self.array.take(pa.array(places)))

    def has_byte(self, byte: int) -> bool:
        """Return whether a byte occurs in a name."""
        offsets, data = string_buffers(self.array)
        return bool((data[offsets[0] : offsets[-1]] == byte).any())

    def save(self, path: Path) -> None:
        """Write one name per line, as :meth:`dglkge.data.vocabulary.Vocabulary.save` does."""
        with open(path, "wb") as file:
            file.writelines(self._lines())

    def _lines(self) -> Iterator[bytes]:
        for start in range(0, len(self.array), _NAMES_AT_A_TIME):
            names = self.array[start : start + _NAMES_AT_A_TIME]
            ends = pa.scalar("\n", names.type)
            joined = pc.binary_join_element_wise(names, ends, pa.scalar("", names.type))
            offsets, data = string_buffers(joined)
            yield data[offsets[0] : offsets[-1]].tobytes()


def string_buffers(names: Strings) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets (n + 1,) and bytes of an array of strings without nulls, as views."""
    dtype = np.int64 if pa.types.is_large_string(names.type) else np.int32
    _, offsets, data = names.buffers()
    if len(names) == 0 or offsets is None:
        return np.zeros(1, dtype), np.zeros(0, np.uint8)
    found = np.frombuffer(offsets, dtype)[names.offset : names.offset + len(names) + 1]
    return found, np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
