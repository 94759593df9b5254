"""Indexes of an explorer: names by their text, and similar entities by faiss, their cosines exact."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize
from tqdm import tqdm

from dglkge.errors import import_extra
from dglkge.inference.search import candidate_blocks, most_similar
from dglkge.inference.whole_tables import Tables

RECALL_WANTED = 0.95
"""The number of searched lists is doubled until a sample has this recall."""

SAMPLE = 100
"""Entities that the recall is measured on."""

RECALL_AT = 10
"""Neighbours of each that are compared."""

ROWS_PER_LIST = 50
"""Rows that the centre of each list is trained on; faiss warns below 39."""

SPARE = 4
"""Candidates that are scored exactly, for each answer: 8-bit rows confuse the order of close neighbours."""


class Neighbours:
    """Approximate nearest entities of one type by cosine.

    Rows are quantized to 8 bits and sorted into lists (inverted file). A search scans the nearest lists; the
    exact cosines of its best candidates come from the mapped rows.

    Attributes
    ----------
    recall : float
        Share of the exact 10 nearest that a search found, over a sample of entities.
    num_lists, num_searched : int
        Lists of the index, and those that a search scans.
    """

    def __init__(
        self, tables: Tables, entity_type: str, threads: int = 1, show_progress: bool = False
    ) -> None:
        self._faiss = faiss = import_extra("--faiss", "faiss", "faiss", "faiss-cpu")
        self._tables, self._type, self._threads = tables, entity_type, threads
        faiss.omp_set_num_threads(threads)
        num_rows, width = tables[entity_type].shape
        draws = np.random.default_rng(0)  # of the rows to train on, and the entities to measure the recall on
        self.num_lists = max(1, min(num_rows // ROWS_PER_LIST, 2 * math.isqrt(num_rows)))
        # Owned by Python: the index only points to it.
        self._quantizer = faiss.IndexFlatIP(width)
        self._index = faiss.IndexIVFScalarQuantizer(
            self._quantizer, width, self.num_lists, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        )
        training = draws.choice(num_rows, min(num_rows, ROWS_PER_LIST * self.num_lists), replace=False)
        self._index.train(self._normalized(np.sort(training)))
        bar = tqdm(total=num_rows, desc="faiss", unit="row", disable=None if show_progress else True)
        with bar:
            for shard in tables.shards(entity_type):
                for start, stop in candidate_blocks(1, shard):
                    rows = normalize(shard.rows[start:stop]).numpy()
                    self._index.add_with_ids(rows, shard.original_ids[start:stop].numpy())
                    bar.update(stop - start)
        sample = draws.choice(num_rows, min(num_rows, SAMPLE), replace=False)
        self.num_searched, self.recall = self._tune(sample)

    def describe(self) -> dict[str, Any]:
        """Return the recall, and how many lists there are and are searched."""
        counts = {"lists": self.num_lists, "lists_searched": self.num_searched}
        return {"method": "faiss", "recall_at_10": self.recall, **counts}

    def search(self, entity_id: int, k: int) -> list[tuple[int, float]]:
        """Return (id, cosine) of the nearest entities, the best first, without the entity itself."""
        # A setting of the calling thread, which is not the one that built the index.
        self._faiss.omp_set_num_threads(self._threads)
        query = self._normalized(np.array([entity_id]))
        _, (candidates,) = self._index.search(query, SPARE * k + 1)
        # -1 stands for candidates that the searched lists did not have.
        ids = np.sort(candidates[(candidates >= 0) & (candidates != entity_id)])
        cosines = self._normalized(ids) @ query[0]
        # Equal cosines in the order of ids, as in exact search.
        best = np.argsort(-cosines, kind="stable")[:k]
        return list(zip(ids[best].tolist(), cosines[best].tolist()))

    def _normalized(self, ids: np.ndarray) -> np.ndarray:
        return normalize(self._tables.gather(self._type, torch.from_numpy(ids))).numpy()

    def _tune(self, sample: np.ndarray) -> tuple[int, float]:
        """Find the number of lists to search; return it and its recall on a sample of entities."""
        exact = most_similar(self._tables, self._type, torch.from_numpy(sample), RECALL_AT)
        nearest = [{id_ for id_, _ in answers} for answers in exact]
        searched = 1
        while True:
            self._index.nprobe = searched
            hits = sum(
                len(right & {id_ for id_, _ in self.search(int(entity), RECALL_AT)})
                for entity, right in zip(sample, nearest)
            )
            recall = hits / max(1, sum(map(len, nearest)))
            if recall >= RECALL_WANTED or searched == self.num_lists:
                return searched, recall
            searched = min(2 * searched, self.num_lists)


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
