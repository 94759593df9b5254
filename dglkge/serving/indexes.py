"""Indexes of an explorer: names by their text, and similar entities by faiss, their cosines exact."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dglkge.inference.row_index import SPARE, RowIndex
from dglkge.inference.search import most_similar
from dglkge.inference.whole_tables import Tables

SAMPLE = 100
"""Entities that the recall is measured on."""

RECALL_AT = 10
"""Neighbours of each that are compared."""


class Neighbours(RowIndex):
    """Approximate nearest entities of one type by cosine; the cosines of the best candidates are exact.

    Attributes
    ----------
    recall : float
        Share of the exact 10 nearest that a search found, over a sample of entities.
    """

    def __init__(
        self, tables: Tables, entity_type: str, threads: int = 1, show_progress: bool = False
    ) -> None:
        super().__init__("--faiss", tables, entity_type, threads, show_progress, is_normalized=True)
        num_rows = len(tables[entity_type])
        sample = np.random.default_rng(1).choice(num_rows, min(num_rows, SAMPLE), replace=False)
        exact = most_similar(tables, entity_type, torch.from_numpy(sample), RECALL_AT)
        nearest = [{id_ for id_, _ in answers} for answers in exact]

        def recall() -> float:
            found = ({id_ for id_, _ in self.search(int(entity), RECALL_AT)} for entity in sample)
            hits = sum(len(right & own) for right, own in zip(nearest, found))
            return hits / max(1, sum(map(len, nearest)))

        self.recall = self.tune(recall)

    def describe(self) -> dict[str, Any]:
        """Return the recall, and how many lists there are and are searched."""
        counts = {"lists": self.num_lists, "lists_searched": self.num_searched}
        return {"method": "faiss", "recall_at_10": self.recall, **counts}

    def search(self, entity_id: int, k: int) -> list[tuple[int, float]]:
        """Return (id, cosine) of the nearest entities, the best first, without the entity itself."""
        query = self.rows(np.array([entity_id]))
        (candidates,) = self.nearest(query, SPARE * k + 1)
        ids = np.sort(candidates[(candidates >= 0) & (candidates != entity_id)])
        cosines = self.rows(ids) @ query[0]
        # Equal cosines in the order of ids, as in exact search.
        best = np.argsort(-cosines, kind="stable")[:k]
        return list(zip(ids[best].tolist(), cosines[best].tolist()))


END = b"\n"
"""Ends each name in the searched text; no name contains it, because names are lines of a file."""


class NameIndex:
    """Names of one entity type by id, searched without regard to case."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        folded = [name.casefold() for name in names]
        # Ids in the order of names, 8 bytes each. A sorted copy of the names would need ten times that.
        self._order = np.array(sorted(range(len(names)), key=folded.__getitem__), dtype=np.int64)
        encoded = [name.encode("utf-8", "surrogatepass") for name in folded]
        # One text of UTF-8: a str would take 4 bytes for each character if one name has a rare one.
        self._text = END.join([*encoded, b""])
        self._starts = np.cumsum([0, *(len(name) + 1 for name in encoded)], dtype=np.int64)

    def starting(self, prefix: str) -> Iterator[int]:
        """Yield the ids of the names that begin with a text, in alphabetical order."""
        start = prefix.casefold()
        first = bisect.bisect_left(self._order, start, key=lambda id_: self._names[id_].casefold())
        # Names that begin alike are neighbours in this order.
        for id_ in map(int, self._order[first:]):
            if not self._names[id_].casefold().startswith(start):
                return
            yield id_

    def containing(self, text: str) -> Iterator[int]:
        """Yield the ids of the names that contain a text but do not begin with it, in the order of ids."""
        part = text.casefold().encode("utf-8", "surrogatepass")
        if not part or END in part:
            return
        # UTF-8 of a character is never found inside that of others, so bytes may be searched.
        # After each hit the search goes on at the next name.
        place = self._text.find(part)
        while place >= 0:
            id_ = int(np.searchsorted(self._starts, place, side="right")) - 1
            if place != self._starts[id_]:
                yield id_
            place = self._text.find(part, int(self._starts[id_ + 1]))
