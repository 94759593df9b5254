"""Search for names by how they begin, or by any part of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

END = b"\n"
"""Ends each name in the searched text; no name contains it, because names are lines of a file."""


class NameIndex:
    """Names of one entity type, searched without regard to case.

    Parameters
    ----------
    names : sequence of str
        The name of id 0, 1, 2, ...
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        folded = [name.casefold() for name in names]
        # Ids in the order of names, 8 bytes each. A sorted copy of the names would need ten times that.
        self._order = np.array(sorted(range(len(names)), key=folded.__getitem__), dtype=np.int64)
        encoded = [name.encode("utf-8", "surrogatepass") for name in folded]
        # One text of UTF-8: a str would take 4 bytes for each character if one name has a rare one.
        self._text = END.join([*encoded, b""])
        self._starts = np.concatenate(
            [np.zeros(1, np.int64), np.cumsum([len(name) + 1 for name in encoded], dtype=np.int64)]
        )

    def starting(self, prefix: str) -> Iterator[int]:
        """Yield the ids of the names that begin with a text, in alphabetical order."""
        wanted = prefix.casefold()
        low, high = 0, len(self._order)
        while low < high:
            middle = (low + high) // 2
            if self._names[self._order[middle]].casefold() < wanted:
                low = middle + 1
            else:
                high = middle
        # Names that begin alike are neighbours in this order.
        for place in range(low, len(self._order)):
            id_ = int(self._order[place])
            if not self._names[id_].casefold().startswith(wanted):
                return
            yield id_

    def containing(self, text: str) -> Iterator[int]:
        """Yield the ids of the names that contain a text but do not begin with it, in the order of ids."""
        wanted = text.casefold().encode("utf-8", "surrogatepass")
        if not wanted or END in wanted:
            return
        # UTF-8 of a character is never found inside that of others, so bytes may be searched.
        # After each hit the search goes on at the next name.
        place = self._text.find(wanted)
        while place >= 0:
            id_ = int(np.searchsorted(self._starts, place, side="right")) - 1
            if place != self._starts[id_]:
                yield id_
            place = self._text.find(wanted, int(self._starts[id_ + 1]))
