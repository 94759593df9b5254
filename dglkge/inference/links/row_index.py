"""Approximate search for the rows of one entity type with the greatest inner products, by faiss."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

from dglkge.errors import import_extra
from dglkge.inference.search import candidate_blocks
from dglkge.inference.whole_tables import Tables

RECALL_WANTED = 0.95
"""The number of searched lists is doubled until a sample has this recall."""

ROWS_PER_LIST = 50
"""Rows that the centre of each list is trained on."""

SPARE = 4
"""Candidates that are scored exactly, for each answer: 8-bit rows confuse the order of close neighbours."""


class RowIndex:
    """Rows quantized to 8 bits and sorted into lists (inverted file), of which a search scans the nearest.

    Attributes
    ----------
    num_lists, num_searched : int
        Lists of the index, and those that a search scans.
    threads : int
        Of a search.

    Parameters
    ----------
    option : str
        What needs faiss, for the error without it.
    is_normalized : bool
        Divide each row by its norm: inner products of such rows are cosines.
    """

    def __init__(
        self,
        option: str,
        tables: Tables,
        entity_type: str,
        threads: int = 1,
        show_progress: bool = False,
        is_normalized: bool = False,
    ) -> None:
        self._faiss = faiss = import_extra(option, "faiss", "faiss", "faiss-cpu")
        self._tables, self._type, self.threads = tables, entity_type, threads
        self._is_normalized = is_normalized
        faiss.omp_set_num_threads(threads)
        num_rows, width = tables[entity_type].shape
        self.num_lists = max(1, min(num_rows // ROWS_PER_LIST, 2 * math.isqrt(num_rows)))
        self.num_searched = 1
        # Owned by Python: the index only points to it.
        self._quantizer = faiss.IndexFlatIP(width)
        self._index = faiss.IndexIVFScalarQuantizer(
            self._quantizer, width, self.num_lists, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        )
        self._index.cp.min_points_per_centroid = 1  # no warning: a type of few rows has one list
        draws = np.random.default_rng(0)
        training = draws.choice(num_rows, min(num_rows, ROWS_PER_LIST * self.num_lists), replace=False)
        self._index.train(self.rows(np.sort(training)))
        bar = tqdm(total=num_rows, desc="faiss", unit="row", disable=None if show_progress else True)
        with bar:
            for shard in tables.shards(entity_type):
                for start, stop in candidate_blocks(1, shard):
                    rows = self._prepared(shard.rows[start:stop])
                    self._index.add_with_ids(rows, shard.original_ids[start:stop].numpy())
                    bar.update(stop - start)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows (n, D) of original ids, float32, as they are indexed."""
        return self._prepared(self._tables.gather(self._type, torch.from_numpy(ids)))

    def _prepared(self, rows: Tensor) -> np.ndarray:
        return (normalize(rows) if self._is_normalized else rows).float().numpy()

    def nearest(self, queries: np.ndarray, k: int) -> np.ndarray:
        """Return the ids (n, k) of candidates of queries (n, D), -1 where the lists have no more."""
        # A setting of the calling thread, which is not the one that built the index.
        self._faiss.omp_set_num_threads(self.threads)
        # Rows may be narrower than queries: they have zeros at their end.
        _, ids = self._index.search(np.ascontiguousarray(queries[:, : self._index.d]), k)
        nearest: np.ndarray = ids
        return nearest

    def tune(self, recall: Callable[[], float]) -> float:
        """Double the number of searched lists until a recall suffices; return the last one."""
        while True:
            self._index.nprobe = self.num_searched
            share = recall()
            if share >= RECALL_WANTED or self.num_searched == self.num_lists:
                return share
            self.num_searched = min(2 * self.num_searched, self.num_lists)
