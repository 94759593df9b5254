"""Approximate similarity for types of millions of entities: a faiss index, its answers scored exactly."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn.functional import normalize
from tqdm import tqdm

from dglkge.inference.exports.vectors import import_faiss
from dglkge.inference.imports.dglke_files import Tables
from dglkge.inference.search import candidate_blocks, most_similar

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

    Parameters
    ----------
    tables : Checkpoint or DglkeTables
    entity_type : str
    threads : int
        Threads of faiss.
    show_progress : bool
        Show a progress bar on a terminal.
    seed : int
        Of the rows that the lists are trained on, and of the entities that the recall is measured on.

    Attributes
    ----------
    recall : float
        Share of the exact 10 nearest that a search found, over a sample of entities.
    num_lists, num_searched : int
        Lists of the index, and those that a search scans.
    """

    def __init__(
        self,
        tables: Tables,
        entity_type: str,
        threads: int = 1,
        show_progress: bool = False,
        seed: int = 0,
    ) -> None:
        self._faiss = faiss = import_faiss("--faiss")
        self._tables, self._type, self._threads = tables, entity_type, threads
        faiss.omp_set_num_threads(threads)
        num_rows, width = tables[entity_type].shape
        draws = np.random.default_rng(seed)
        self.num_lists = max(1, min(num_rows // ROWS_PER_LIST, 2 * math.isqrt(num_rows)))
        # Owned by Python: the index only points to it.
        self._quantizer = faiss.IndexFlatIP(width)
        self._index = faiss.IndexIVFScalarQuantizer(
            self._quantizer,
            width,
            self.num_lists,
            faiss.ScalarQuantizer.QT_8bit,
            faiss.METRIC_INNER_PRODUCT,
        )
        chosen = draws.choice(num_rows, min(num_rows, ROWS_PER_LIST * self.num_lists), replace=False)
        self._index.train(self._normalized(np.sort(chosen)))
        bar = tqdm(total=num_rows, desc="faiss", unit="row", disable=None if show_progress else True)
        with bar:
            for shard in tables.shards(entity_type):
                for start, stop in candidate_blocks(1, shard):
                    rows = normalize(shard.rows[start:stop]).numpy()
                    self._index.add_with_ids(rows, shard.original_ids[start:stop].numpy())
                    bar.update(stop - start)
        sample = draws.choice(num_rows, min(num_rows, SAMPLE), replace=False)
        self.num_searched, self.recall = self._tune(sample)

    def search(self, entity_id: int, topk: int) -> list[tuple[int, float]]:
        """Return (id, cosine) of the nearest entities, the best first, without the entity itself."""
        # A setting of the calling thread, which is not the one that built the index.
        self._faiss.omp_set_num_threads(self._threads)
        query = self._normalized(np.array([entity_id]))
        _, found = self._index.search(query, SPARE * topk + 1)
        # -1 stands for candidates that the searched lists did not have.
        ids = np.sort(found[0][(found[0] >= 0) & (found[0] != entity_id)])
        cosines = self._normalized(ids) @ query[0]
        # Equal cosines in the order of ids, as in exact search.
        best = np.argsort(-cosines, kind="stable")[:topk]
        return list(zip(ids[best].tolist(), cosines[best].tolist()))

    def _normalized(self, ids: np.ndarray) -> np.ndarray:
        return normalize(self._tables.gather(self._type, torch.from_numpy(ids))).numpy()

    def _tune(self, sample: np.ndarray) -> tuple[int, float]:
        """Find the number of lists to search; return it and its recall on a sample of entities."""
        shards = self._tables.shards(self._type)
        exact = most_similar(self._tables, shards, self._type, torch.from_numpy(sample), RECALL_AT)
        wanted = [{answer.entity_id for answer in answers} for answers in exact]
        searched = 1
        while True:
            self._index.nprobe = searched
            hits = sum(
                len(right & {id_ for id_, _ in self.search(int(entity), RECALL_AT)})
                for entity, right in zip(sample, wanted)
            )
            recall = hits / max(1, sum(map(len, wanted)))
            if recall >= RECALL_WANTED or searched == self.num_lists:
                return searched, recall
            searched = min(2 * searched, self.num_lists)
